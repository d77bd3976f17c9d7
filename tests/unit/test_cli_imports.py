"""Commands that need no model answer at once: they import nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "tokenizers", "jinja2", "transformers", "safetensors", "yaml")

PROGRAM = """
import sys
from slipstream.cli.main import main
code = main(sys.argv[1:])
print(code, [name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["version"], ["models", "list"], ["generate", "--help"], ["bench", "latency", "--help"]],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments):
    program = PROGRAM.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "0 []"
    assert done.stdout
