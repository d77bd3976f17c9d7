"""The native library of the CPU step. Everything else about the package stands in pyproject.toml.

It is a plain shared library with a C interface, loaded by ctypes, so it needs neither Python's headers nor torch's. It
is optional: without a C++ compiler the package installs and runs the PyTorch path.
"""

from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src/slipstream/kernels/cpu")
PROGRAMS_OF_THEIR_OWN = {"replay.cpp"}

sources = sorted(str(path) for path in FOLDER.glob("*.cpp") if path.name not in PROGRAMS_OF_THEIR_OWN)
library = Extension(
    "slipstream.kernels.cpu._native",
    sources=sources,
    depends=["setup.py", *sorted(str(path) for path in FOLDER.glob("*.h"))],
    language="c++",
    # No -march: one library holds the code of all instruction sets and chooses when it is loaded. No contraction but
    # where the source says fma: results must not depend on the compiler.
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fvisibility=hidden",
        "-pthread",
    ],
    extra_link_args=["-pthread"],
    optional=True,
)
setup(ext_modules=[library] if sources else [])
