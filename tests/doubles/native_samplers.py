"""The native sampler as an op with the reference's signature, on every instruction set that this machine has."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.library import ISAS, NativeLibrary, NativePool
from slipstream.kernels.cpu.sampling import NativeSampler

SOURCES = ("sample.cpp", "sample_isas.cpp", "pool.cpp")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-pthread", "-fPIC", "-w")


@cache
def _handle() -> tuple[Any, Path] | None:
    """The package's library; where it is not built, the sampler's sources alone, or None without a compiler."""
    found = native._open(Path(native.__file__).parent)
    if not isinstance(found, native.Missing) and hasattr(found[0], "ss_sampler_create"):
        return found
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    folder = Path(native.__file__).parent
    path = Path(tempfile.mkdtemp()) / "sampler.so"
    subprocess.run([compiler, *FLAGS, "-shared", "-o", path, *(folder / name for name in SOURCES)], check=True)
    handle: Any = ctypes.CDLL(str(path))
    handle.ss_pool_create.restype = ctypes.c_void_p
    handle.ss_pool_destroy.argtypes = (ctypes.c_void_p,)
    return handle, path


def isas() -> list[str]:
    """Names of the instruction sets to test; empty without a library and a compiler."""
    if _handle() is None:
        return []
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    has = {"portable": True, "avx2": " avx2 " in flags and " fma " in flags, "avx512": "avx512_vnni" in flags}
    return [isa for isa in ISAS if has[isa]]


def library(isa: str) -> NativeLibrary:
    found = _handle()
    assert found is not None
    return NativeLibrary(found[0], found[1], ISAS.index(isa))


@cache
def make(isa: str, vocab: int, threads: int = 1) -> NativeSampler:
    """A sampler, kept for the whole run."""
    loaded = library(isa)
    pool = None if threads == 1 else NativePool(loaded, threads, sorted(os.sched_getaffinity(0)))
    return NativeSampler(loaded, vocab, pool=pool)


def native_op(isa: str, threads: int = 1) -> Callable[..., tuple[torch.Tensor, ...]]:
    """`slipstream::sample` by the native sampler: the op's arguments and results."""

    def op(
        logits: torch.Tensor,
        reals: torch.Tensor,
        wholes: torch.Tensor,
        penalised: torch.Tensor,
        bias_at: torch.Tensor,
        bias_value: torch.Tensor,
        banned: torch.Tensor,
        allowed: torch.Tensor,
        grammar: torch.Tensor | None,
        num_top: int,
    ) -> tuple[torch.Tensor, ...]:
        rows, vocab = logits.shape
        lists = [t.contiguous().numpy() for t in (reals, wholes, penalised, bias_at, bias_value, banned, allowed)]
        inputs = [*lists, None if grammar is None else grammar.contiguous().numpy()]
        counts = (len(penalised), len(bias_at), len(banned), len(allowed))
        results = make(isa, vocab, threads).sample(logits.contiguous(), rows, inputs, counts, num_top)
        return tuple(torch.from_numpy(result.copy()) for result in results)

    return op
