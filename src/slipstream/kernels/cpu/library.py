"""The native library of the CPU step: found beside this file, loaded with ctypes, its functions with types.

The C interface is described in slipstream.h. Calls let other Python threads run.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.core.config import native_isa
from slipstream.core.errors import ConfigError, SlipstreamError

ABI = 1
ISAS = ("portable", "avx2", "avx512")
"""Instruction sets by their number in the C interface; all give the same bits."""

_ERROR_SIZE = 512


class NativeBatch(ctypes.Structure):
    """`ss_batch`: a step's arrays by address. See slipstream.h."""

    _fields_ = (
        ("num_rows", c_int32),
        ("num_wanted", c_int32),
        ("page_size", c_int32),
        ("table_stride", c_int32),
        ("token", c_void_p),
        ("position", c_void_p),
        ("sequence", c_void_p),
        ("slot", c_void_p),
        ("page_table", c_void_p),
        ("wants_logits", c_void_p),
        ("caches", POINTER(c_void_p)),
        ("logits", c_void_p),
    )


class ProgramRefused(SlipstreamError):
    """The library's sentence about a program text that it cannot run."""


@dataclass(frozen=True)
class NativeLibrary:
    """The loaded library and the instruction set that it is used with."""

    handle: Any
    path: Path
    isa: int

    def describe(self) -> str:
        best = self.handle.ss_best_isa()
        lowered = "" if self.isa == best else f", lowered from {ISAS[best]}"
        return f"{self.path.name} ({ISAS[self.isa]}{lowered})"


@dataclass(frozen=True)
class Missing:
    """Why there is no library."""

    reason: str


def load_library() -> NativeLibrary | Missing:
    """The library, or why it cannot be used. Raises ConfigError if SLIPSTREAM_NATIVE_ISA asks for what is not there."""
    found = _open(Path(__file__).parent)
    if isinstance(found, Missing):
        return found
    handle, path = found
    best = int(handle.ss_best_isa())
    wanted = native_isa()
    if wanted is None:
        return NativeLibrary(handle, path, best)
    if wanted not in ISAS:
        raise ConfigError(f"SLIPSTREAM_NATIVE_ISA must be one of {', '.join(ISAS)}, not {wanted!r}", param="native_isa")
    if ISAS.index(wanted) > best:
        raise ConfigError(
            f"SLIPSTREAM_NATIVE_ISA asks for {wanted}, but this processor runs {ISAS[best]} at most", param="native_isa"
        )
    return NativeLibrary(handle, path, ISAS.index(wanted))


@cache
def _open(folder: Path) -> tuple[Any, Path] | Missing:
    """Open the library in `folder` and give its functions their types."""
    paths = [folder / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return Missing("not built (no C++ compiler was found when the package was installed)")
    try:
        handle: Any = ctypes.CDLL(str(path))
        handle.ss_abi.argtypes, handle.ss_abi.restype = (), c_int
        abi = int(handle.ss_abi())
    except (OSError, AttributeError) as error:
        return Missing(f"{path.name} cannot be loaded ({error})")
    if abi != ABI:
        return Missing(f"{path.name} is of another version (interface {abi}, this package needs {ABI}); install again")
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "ss_best_isa": (c_int, ()),
        "ss_pool_create": (c_void_p, (c_int, POINTER(c_int32), c_int)),
        "ss_pool_destroy": (None, (c_void_p,)),
        "ss_program_create": (
            c_void_p,
            (c_char_p, c_void_p, c_int64, c_int, c_int32, c_char_p, c_int32),
        ),
        "ss_program_destroy": (None, (c_void_p,)),
        "ss_program_buffer": (c_void_p, (c_void_p, c_int32, POINTER(c_int64))),
        "ss_program_length": (c_int32, (c_void_p,)),
        "ss_program_run": (c_int32, (c_void_p, c_void_p, POINTER(NativeBatch), c_int32, c_int32)),
    }
    try:
        for name, (result, arguments) in signatures.items():
            function = getattr(handle, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        return Missing(f"{path.name} is incomplete ({error})")
    return handle, path


class NativePool:
    """Threads that run a step together: the calling one and `threads - 1` helpers, pinned within `cpus`."""

    def __init__(self, library: NativeLibrary, threads: int, cpus: Sequence[int]) -> None:
        self.threads = threads
        array = (c_int32 * len(cpus))(*cpus)
        self.address = library.handle.ss_pool_create(threads, array, len(cpus))
        if not self.address:
            raise SlipstreamError(f"the native step's {threads} threads could not be started")
        self.close = weakref.finalize(self, library.handle.ss_pool_destroy, self.address)


class NativeProgram:
    """A program text made ready to run over packed weights at `weights_address`, which must outlive it.

    `length` counts its instructions. Raises ProgramRefused.
    """

    def __init__(
        self, library: NativeLibrary, text: str, weights_address: int, weights_size: int, *, max_rows: int
    ) -> None:
        self.max_rows = max_rows
        self._handle = library.handle
        error = ctypes.create_string_buffer(_ERROR_SIZE)
        self.address = self._handle.ss_program_create(
            text.encode(), weights_address, weights_size, library.isa, max_rows, error, _ERROR_SIZE
        )
        if not self.address:
            raise ProgramRefused(f"the native step refuses the program: {error.value.decode(errors='replace')}")
        self.close = weakref.finalize(self, self._handle.ss_program_destroy, self.address)
        self.length = int(self._handle.ss_program_length(self.address))

    def buffer(self, number: int) -> tuple[int, int]:
        """Address of row 0 of a buffer, and the bytes from row to row."""
        row_bytes = c_int64()
        address = self._handle.ss_program_buffer(self.address, number, ctypes.byref(row_bytes))
        return int(address), row_bytes.value


def floats_at(address: int, count: int) -> npt.NDArray[np.float32]:
    """`count` float32 values at `address`, without a copy; the array does not own them."""
    return np.ctypeslib.as_array((c_float * count).from_address(address))
