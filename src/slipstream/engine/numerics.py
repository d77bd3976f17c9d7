"""Which way a model is computed: natively from packed weights, or by the reference in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.core.config import LEAST_NATIVE_PAGE, EngineConfig
from slipstream.core.errors import ConfigError
from slipstream.devices.cpu import CpuDevice
from slipstream.devices.native_cpu import NativeCpuDevice, check_heads
from slipstream.devices.not_lowerable import NotLowerable
from slipstream.devices.program_cache import Options, program_of
from slipstream.kernels.cpu.library import Missing, NativeLibrary, ProgramRefused, load_library
from slipstream.kernels.cpu.program import Program
from slipstream.loading.checkpoint import Checkpoint
from slipstream.loading.weight_source import CheckpointSource
from slipstream.models.base import CheckpointModel

Device = CpuDevice | NativeCpuDevice
DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}


def program_options(config: EngineConfig) -> Options:
    """What `config` says about programs."""
    kind = "bf16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    return Options(cache_kind=kind, quantization=config.quantization)


def max_rows(config: EngineConfig) -> int:
    """Rows of a step at most."""
    return max(config.max_num_batched_tokens, config.max_num_seqs)


def native_library(config: EngineConfig) -> NativeLibrary | str:
    """The library if a model could be run natively, else why `config` or this machine does not let it."""
    if config.numerics == "reference":
        return "numerics reference was chosen"
    if config.numerics == "auto":
        if config.dtype != "auto":
            return f"dtype {config.dtype} was chosen"
        if config.page_size < LEAST_NATIVE_PAGE:
            return f"page_size {config.page_size} is less than {LEAST_NATIVE_PAGE}"
    library = load_library()
    return f"the native library is {library.reason}" if isinstance(library, Missing) else library


def choose_device(
    config: EngineConfig,
    model: CheckpointModel,
    checkpoint: Checkpoint,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Device, str]:
    """The device that `config` asks for, and why, in a line.

    For native numerics the weights are packed (`progress` gets bytes done and in all) and the model's parameters stay
    empty; for the reference they are still to be loaded. Raises ConfigError, and LoadError for a checkpoint that is
    not the model's.
    """
    library = native_library(config)
    if isinstance(library, str):
        return _reference(config, library)
    source = CheckpointSource(checkpoint, model)
    try:
        device = NativeCpuDevice(
            library,
            model,
            model.cache_specs(),
            source,
            threads=config.threads,
            options=program_options(config),
            max_rows=max_rows(config),
            progress=progress,
        )
    except (NotLowerable, ProgramRefused) as error:
        return _reference(config, str(error))
    return device, f"native: {library.describe()}, program {device.prepared.origin}"


def program_or_reason(config: EngineConfig, model: CheckpointModel, checkpoint: Checkpoint) -> Program | str:
    """The program that `config` would run the model with, or why the reference would; no weights are read.

    What only the library can tell about a program is not asked.
    """
    library = native_library(config)
    if isinstance(library, str):
        return library
    specs = model.cache_specs()
    try:
        check_heads(specs)
        return program_of(model, specs, CheckpointSource(checkpoint, model), program_options(config))[0]
    except NotLowerable as error:
        return str(error)


def _reference(config: EngineConfig, reason: str) -> tuple[Device, str]:
    if config.numerics == "native":
        raise ConfigError(f"numerics native is not possible: {reason}", param="numerics")
    for name, neutral in (("quantization", "none"), ("kv_cache_dtype", "auto")):
        if getattr(config, name) != neutral:
            raise ConfigError(f"{name} {getattr(config, name)} needs native numerics, but {reason}", param=name)
    return CpuDevice(config.threads, DTYPES[config.dtype]), f"reference: {reason}"
