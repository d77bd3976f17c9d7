"""`slipstream doctor`: what this machine offers, and what would run on it."""

from __future__ import annotations

import json
import os
import platform
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream import __version__
from slipstream.cli.console import facts, progress_bars, stdout_console
from slipstream.cli.flags import ENGINE_NAMES
from slipstream.cli.options import takes_flags
from slipstream.cli.settings import Settings
from slipstream.core.config import EngineConfig, cache_dir
from slipstream.core.errors import LoadError

if TYPE_CHECKING:
    from slipstream.engine.invariance import InvarianceReport
    from slipstream.kernels.cpu.program import Program


@takes_flags(ENGINE_NAMES)
def doctor(
    invariance: Annotated[
        bool,
        typer.Option("--invariance", help="Load the model and check that a row's bits depend on nothing beside it."),
    ] = False,
    program: Annotated[
        bool, typer.Option("--program", help="Show the model's native program: its instructions and what they read.")
    ] = False,
    context: Annotated[
        int, typer.Option("--context", min=1, help="With --program: the position whose row is counted, in tokens.")
    ] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    settings: Settings,
) -> None:
    """Show this machine's device, memory and operators, and what a model takes on it."""
    config = EngineConfig.from_mapping(settings.engine)
    found = examine(config)
    if not as_json:
        _print(found)
    if program:
        found["program"] = _program(config, context)
        if not as_json:
            _print_program(found["program"])
    report = None
    if invariance:
        report = _check(config)
        found["invariance"] = {
            "ok": report.ok,
            "rows": report.rows,
            "ways": report.ways,
            "differences": [str(difference) for difference in report.differences],
        }
        if not as_json:
            _print_invariance(report)
    if as_json:
        print(json.dumps(found, indent=2))
    if report is not None and not report.ok:
        raise typer.Exit(1)


def examine(config: EngineConfig) -> dict[str, Any]:
    """Everything `doctor` tells, as plain values."""
    import torch

    from slipstream import ops
    from slipstream.cli.program_view import runners
    from slipstream.devices.cpu import CACHE_SHARE, CpuDevice
    from slipstream.devices.host import available_memory, cpu_name

    free = available_memory()
    device = CpuDevice(config.threads, torch.bfloat16 if config.dtype == "bfloat16" else torch.float32)
    model, program = _model(config, device)
    who = {name: op.who_runs(device.dispatch_key) for name, op in sorted(ops.OPS.items())}
    return {
        "device": device.name,
        "cpu": cpu_name(),
        "threads": {"count": device.threads, "why": _why_threads(config)},
        "memory_free_bytes": free,
        "cache_memory_bytes": config.cache_memory or int(free * CACHE_SHARE),
        "cache_memory_why": "as set" if config.cache_memory else f"{CACHE_SHARE:.0%} of the free memory",
        "slipstream": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_build": _torch_build(),
        "cache_dir": str(cache_dir()),
        "native_library": _library(),
        "numerics": f"reference: {program}" if isinstance(program, str) else f"native: {_library()}",
        "model": model,
        "ops": who if isinstance(program, str) else runners(program, who),
    }


def _library() -> str:
    """The native library and its instruction set, or why there is none."""
    from slipstream.kernels.cpu.library import Missing, load_library

    library = load_library()
    return library.reason if isinstance(library, Missing) else library.describe()


def _program(config: EngineConfig, context: int) -> dict[str, Any]:
    """The program of the model that `config` names, from the cache or lowered now."""
    from slipstream.cli.program_view import as_values
    from slipstream.devices.not_lowerable import NotLowerable
    from slipstream.devices.program_cache import program_of
    from slipstream.engine.numerics import program_options
    from slipstream.loading import catalog
    from slipstream.loading.checkpoint import open_checkpoint
    from slipstream.loading.weight_source import CheckpointSource
    from slipstream.models.registry import build_model

    checkpoint = open_checkpoint(catalog.resolve(config.model or None, fetch_missing=False))
    try:
        model = build_model(checkpoint.config)
        source = CheckpointSource(checkpoint, model)
        return as_values(program_of(model, model.cache_specs(), source, program_options(config))[0], context)
    except NotLowerable as error:
        return {"not_lowerable": str(error)}
    finally:
        checkpoint.close()


def _why_threads(config: EngineConfig) -> str:
    from slipstream.devices.host import allowed_cpus

    if config.threads is not None:
        return "as set"
    machine = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    if allowed_cpus() < affinity:
        return f"the cgroup's CPU limit; the machine has {machine}"
    if affinity < machine:
        return f"the CPUs this process may run on; the machine has {machine}"
    return "all CPUs of the machine"


def _torch_build() -> dict[str, Any]:
    import torch

    return {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
        "openmp": torch.backends.openmp.is_available(),
    }


def _model(config: EngineConfig, device: Any) -> tuple[dict[str, Any], Program | str | None]:
    """What the model takes, from its files' headers, and its native program or why it has none.

    A model that is not on this machine is only named, and what its program would be is not known (None).
    """
    from slipstream.devices.native_cpu import page_bytes
    from slipstream.engine.numerics import native_library, program_options, program_or_reason
    from slipstream.loading import catalog
    from slipstream.loading.checkpoint import open_checkpoint
    from slipstream.models.registry import build_model

    name = config.model or catalog.DEFAULT_MODEL
    try:
        checkpoint = open_checkpoint(catalog.resolve(config.model or None, fetch_missing=False))
    except LoadError as error:
        if config.model:
            raise
        library = native_library(config)
        return {"name": name, "missing": error.message}, library if isinstance(library, str) else None
    try:
        model: Any = build_model(checkpoint.config)  # on the meta device: shapes without memory
        specs = model.cache_specs()
        program = program_or_reason(config, model, checkpoint)
        if isinstance(program, str):
            loaded = sum(parameter.numel() for parameter in model.parameters()) * device.dtype.itemsize
            loaded_as, page = str(device.dtype).removeprefix("torch."), device.page_bytes(specs, config.page_size)
        else:
            loaded, loaded_as = program.data_size, "packed"
            page = page_bytes(specs, config.page_size, program_options(config).cache_kind)
        found = {
            "name": name,
            "path": str(checkpoint.path),
            "stored_bytes": checkpoint.describe()["bytes"],
            "loaded_bytes": loaded,
            "loaded_as": loaded_as,
            "page_tokens": config.page_size,
            "page_bytes": page,
        }
        return found, program
    finally:
        checkpoint.close()


def _check(config: EngineConfig) -> InvarianceReport:
    with progress_bars() as progress:
        progress("starting", 0, 0)
        from slipstream.engine.build import load_engine
        from slipstream.engine.invariance import check_invariance

        loaded = load_engine(config, progress)
        progress("checking", 0, 0)
        return check_invariance(loaded.model, loaded.device, page_size=config.page_size)


def _print(found: dict[str, Any]) -> None:
    from rich.table import Table

    pairs: list[tuple[str, str]] = []

    def row(name: str, value: str) -> None:
        pairs.append((name, value))

    build = found["torch_build"]
    with_parts = ", ".join(part for part in ("mkl", "onednn", "openmp") if build[part]) or "no libraries"
    row("device", f"{found['device']}: {found['cpu']}")
    row("threads", f"{found['threads']['count']} ({found['threads']['why']})")
    row("free memory", _mib(found["memory_free_bytes"]))
    row("cache", f"{_mib(found['cache_memory_bytes'])} ({found['cache_memory_why']})")
    row("slipstream", f"{found['slipstream']}, Python {found['python']}")
    row("torch", f"{found['torch']} ({build['cpu_capability']}, with {with_parts})")
    row("native library", found["native_library"])
    row("numerics", found["numerics"])
    row("cache folder", found["cache_dir"])
    model = found["model"]
    row("model", model.get("path") or model["missing"])
    if "path" in model:
        form = "packed" if model["loaded_as"] == "packed" else f"as {model['loaded_as']}"
        row("", f"{_mib(model['stored_bytes'])} stored, {_mib(model['loaded_bytes'])} {form}")
        row("", f"{model['page_bytes'] / 2**20:.2f} MiB of cache for {model['page_tokens']} tokens")
    console = stdout_console()
    console.print(facts(pairs))
    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0))
    table.add_column("operator")
    native = found["numerics"].startswith("native")
    table.add_column("runs as" if native else "runs on this device")
    for name, who in found["ops"].items():
        table.add_row(name, who if who != "reference" else "reference (plain PyTorch)")
    console.print()
    console.print(table)


def _print_program(found: dict[str, Any]) -> None:
    from rich.table import Table

    console = stdout_console()
    console.print()
    if "not_lowerable" in found:
        console.print(f"no native program: {found['not_lowerable']}", markup=False)
        return
    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0))
    for title in ("", "instruction", "per row", "weights"):
        table.add_column(title)
    table.add_column("KiB read", justify="right")
    for number, line in enumerate(found["instructions"]):
        table.add_row(str(number), line["name"], line["shapes"], line["weights"], f"{line['bytes'] / 1024:.1f}")
    console.print(table)
    console.print(f"\nA step of one row at {found['context']} tokens reads {found['bytes_per_step'] / 1e6:.1f} MB:")
    for name, size in found["bytes_by_instruction"].items():
        console.print(f"   {size / 1e6:10.3f} MB   {name}", markup=False)
    console.print(f"Packed weights take {found['packed_bytes'] / 1e6:.1f} MB.")


def _print_invariance(report: InvarianceReport) -> None:
    console = stdout_console()
    console.print()
    if report.ok:
        console.print(f"[bold green]OK[/] {report.rows} rows have the same bits as alone and whole:")
        for way in report.ways:
            console.print(f"   {way}", markup=False)
        return
    for difference in report.differences:
        console.print(f"DIFFERENT {difference}", style="bold red", markup=False)


def _mib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
