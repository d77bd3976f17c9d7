"""The native sources outside of Python: under sanitizers, and compiled for another processor."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from doubles.native_decoder import SHAPES, Decoder
from doubles.native_programs import Part, Plan, make_batch
from slipstream.kernels import cpu
from slipstream.kernels.cpu.dump import write_dump

FOLDER = Path(cpu.__file__).parent
SOURCES = sorted(FOLDER.glob("*.cpp"))
FLAGS = ["-std=c++17", "-Wall", "-ffp-contract=off", "-fno-math-errno", "-pthread"]
COMPILER = shutil.which("g++") or shutil.which("clang++")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
pytestmark = pytest.mark.skipif(len(SOURCES) < 3, reason="an installed package has no sources")


def compile_(command: list[str], sources: list[Path], out: Path) -> None:
    """One object a source, two at a time, then the program."""
    objects = [out.parent / f"{out.name}-{source.stem}.o" for source in sources]
    waiting = list(zip(sources, objects, strict=True))
    while waiting:
        batch, waiting = waiting[:2], waiting[2:]
        started = [
            subprocess.Popen([*command, *FLAGS, "-c", str(source), "-o", str(it)], stderr=subprocess.PIPE, text=True)
            for source, it in batch
        ]
        for process in started:
            _, errors = process.communicate()
            assert process.returncode == 0, errors
    done = subprocess.run([*command, *FLAGS, *map(str, objects), "-o", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_compiler
@pytest.mark.parametrize(
    ("options", "share"), [(["-O2"], 1), pytest.param(["-O1", "-fsanitize=thread"], 10, marks=pytest.mark.slow)]
)
def test_workers_run_every_piece_once_and_in_order(options: list[str], share: int, tmp_path: Path) -> None:
    """Millions of short phases, with as many workers as CPUs and with more. A hang is a failure."""
    assert COMPILER is not None
    program, stress = tmp_path / "stress", Path(__file__).parents[1] / "checks" / "pool_stress.cpp"
    compile_([COMPILER, "-g", *options, f"-I{FOLDER}"], [FOLDER / "pool.cpp", stress], program)
    for threads, runs in ((2, 200_000), (3, 30_000), (7, 5_000)):
        done = subprocess.run(
            [str(program), str(threads), str(runs // share)], capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "ok\n", done.stdout + done.stderr


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Programs with every instruction and kind, each with prompts, drafts and single rows over long contexts."""
    folder = tmp_path_factory.mktemp("dumps")
    for name, shape in SHAPES.items():
        rng = np.random.default_rng(1)
        decoder = Decoder(rng, shape)
        parts = [Part(0, 19), Part(300, 1), Part(140, 4), Part(5, 1), Part(127, 2)]
        batch = make_batch(rng, Plan(parts, 16, shape.window, vocabulary=shape.vocabulary, caches=shape.caches))
        built, size = decoder.built, shape.vocabulary
        write_dump(folder / name, built.text, built.weights, max_rows=64, vocabulary=size, **vars(batch))
    return sorted(folder.iterdir())


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizers: str, dumps: list[Path], tmp_path: Path) -> None:
    assert COMPILER is not None
    program = tmp_path / "replay"
    options = ["-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    compile_([COMPILER, *options], SOURCES, program)
    for dump in dumps:
        printed = set()
        isas = 0
        for isa in range(3):
            for threads in (1, 2):
                command = [str(program), str(dump), str(isa), str(threads), "3"]
                done = subprocess.run(command, capture_output=True, text=True)
                if "this processor" in done.stderr:
                    continue
                assert done.returncode == 0, f"{dump.name}, set {isa}, {threads} threads\n{done.stderr}"
                assert not done.stderr, done.stderr
                printed.add(done.stdout.splitlines()[0])
                isas += 1
        assert isas >= 2
        assert len(printed) == 1, f"{dump.name}: {printed}"


def cross_compiler() -> list[str] | None:
    """A compiler for 64-bit ARM: a system's, or zig's (the optional Python package ziglang)."""
    for name in ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-g++-12"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"]
    return None


@pytest.mark.slow
@pytest.mark.skipif(
    cross_compiler() is None,
    reason="NOT COMPILED FOR ARM: neither aarch64-linux-gnu-g++ nor the package ziglang is here",
)
def test_sources_compile_for_arm(tmp_path: Path) -> None:
    command = cross_compiler()
    assert command is not None
    program = tmp_path / "replay"
    compile_([*command, "-O1"], SOURCES, program)
    header = program.read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert header[18] == 0xB7  # AArch64
