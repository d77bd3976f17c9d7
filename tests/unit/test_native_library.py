"""Loading the native library: what is missing or does not fit is a reason, and settings choose between the ways."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doubles.tiny_checkpoints import tiny_model, write_folder, write_gguf
from slipstream.core.batch import StepBatch
from slipstream.core.config import EngineConfig
from slipstream.core.errors import ConfigError
from slipstream.devices.cpu import CpuDevice
from slipstream.devices.native_cpu import NativeCpuDevice
from slipstream.devices.native_step import NativeStep
from slipstream.engine import numerics
from slipstream.engine.invariance import check_invariance
from slipstream.engine.numerics import choose_device
from slipstream.kernels.cpu import library as library_module
from slipstream.kernels.cpu.library import ISAS, Missing, NativeLibrary, NativeProgram, ProgramRefused, load_library
from slipstream.loading.checkpoint import open_checkpoint
from slipstream.loading.weights import load_weights
from slipstream.models.registry import build_model

FOUND = load_library()
needs_library = pytest.mark.skipif(isinstance(FOUND, Missing), reason="the native library is not built")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "load_library", lambda: Missing("not built"))


def chosen(path: Path, **settings: Any) -> tuple[numerics.Device, str]:
    checkpoint = open_checkpoint(path)
    model = build_model(checkpoint.config)
    return choose_device(EngineConfig(**{"numerics": "auto", "threads": 1, **settings}), model, checkpoint)


# The file


def test_no_file_is_a_reason(tmp_path: Path) -> None:
    found = library_module._open(tmp_path)
    assert isinstance(found, Missing)
    assert "not built" in found.reason


def test_a_file_that_is_no_library_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / f"_native{EXTENSION_SUFFIXES[0]}").write_bytes(b"nothing that can be loaded")
    found = library_module._open(tmp_path)
    assert isinstance(found, Missing)
    assert "cannot be loaded" in found.reason


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('extern "C" int ss_abi() { return 77; }', "another version"),
        ('extern "C" int ss_abi() { return 1; }', "incomplete"),
        ("int other;", "cannot be loaded"),
    ],
)
def test_a_library_that_does_not_fit_is_a_reason(tmp_path: Path, source: str, reason: str) -> None:
    (tmp_path / "a.cpp").write_text(source)
    target = tmp_path / f"_native{EXTENSION_SUFFIXES[0]}"
    subprocess.run(["g++", "-shared", "-fPIC", str(tmp_path / "a.cpp"), "-o", str(target)], check=True)
    found = library_module._open(tmp_path)
    assert isinstance(found, Missing)
    assert reason in found.reason


@needs_library
def test_the_instruction_set_can_be_lowered_but_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(FOUND, NativeLibrary)
    monkeypatch.setenv("SLIPSTREAM_NATIVE_ISA", "portable")
    lowered = load_library()
    assert isinstance(lowered, NativeLibrary)
    assert lowered.isa == 0
    monkeypatch.setenv("SLIPSTREAM_NATIVE_ISA", "mmx")
    with pytest.raises(ConfigError, match="portable, avx2, avx512"):
        load_library()
    monkeypatch.setattr(FOUND.handle, "ss_best_isa", lambda: 0)
    monkeypatch.setenv("SLIPSTREAM_NATIVE_ISA", "avx2")
    with pytest.raises(ConfigError, match="runs portable at most"):
        load_library()


@needs_library
def test_a_text_that_is_wrong_is_refused_in_a_sentence() -> None:
    assert isinstance(FOUND, NativeLibrary)
    with pytest.raises(ProgramRefused, match=r"refuses the program: \w"):
        NativeProgram(FOUND, "slipstream-program 1\ndo nonsense\n", ctypes.addressof(ctypes.c_char()), 0, max_rows=4)


# The choice


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"numerics": "reference", "quantization": "int8"}, "quantization"),
        ({"numerics": "reference", "kv_cache_dtype": "bf16"}, "kv_cache_dtype"),
        ({"numerics": "native", "dtype": "float32"}, "dtype"),
        ({"numerics": "native", "page_size": 8}, "page_size"),
        ({"numerics": "exact"}, "numerics"),
        ({"numerics": "auto", "quantization": "int2"}, "quantization"),
        ({"numerics": "auto", "kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings)
    assert caught.value.param == named


def test_without_the_library_the_reference_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch)
    path = write_folder(tmp_path / "m", tiny_model())
    device, why = chosen(path)
    assert isinstance(device, CpuDevice)
    assert why == "reference: the native library is not built"
    with pytest.raises(ConfigError, match="native is not possible: the native library is not built"):
        chosen(path, numerics="native")
    with pytest.raises(ConfigError, match="int8 needs native numerics, but the native library is not built"):
        chosen(path, kv_cache_dtype="int8")


@pytest.mark.parametrize(("settings", "reason"), [({"dtype": "float32"}, "dtype"), ({"page_size": 8}, "page_size")])
def test_settings_of_the_reference_choose_it(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    device, why = chosen(write_folder(tmp_path / "m", tiny_model()), **settings)
    assert isinstance(device, CpuDevice)
    assert why.startswith(f"reference: {reason}")


# The native device


def run_both(path: Path, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of every row of one sequence, in two steps, native and by the reference."""
    checkpoint = open_checkpoint(path)
    found = []
    for kind in ("native", "reference"):
        model = build_model(checkpoint.config)
        options = settings if kind == "native" else {}
        device, _ = choose_device(EngineConfig(numerics=kind, threads=1, **options), model, checkpoint)
        if kind == "reference":
            load_weights(model, checkpoint, torch.float32)
        else:
            assert all(parameter.is_meta for parameter in model.parameters())
        step = device.compile(model, device.allocate(model.cache_specs(), 5, 16))
        batch = StepBatch(max_rows=64, max_sequences=1, max_pages=3, page_size=16)
        parts = []
        for start, count in ((0, 30), (30, 5), (35, 1)):
            batch.clear()
            number = batch.add_sequence(np.array([3, 1, 4], np.int32), start + count)
            batch.add_rows(number, [(7 * i) % 100 for i in range(start, start + count)], start, wants_logits=True)
            parts.append(step.run(batch).clone())
        found.append(torch.cat(parts))
    return found[0], found[1]


@needs_library
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("form", ["F32", "BF16", "Q8_0", "Q4_1"])
def test_the_native_step_is_near_the_reference(tmp_path: Path, family: str, form: str) -> None:
    native, reference = run_both(write_gguf(tmp_path / "m.gguf", tiny_model(family, head_dim=32), formats=form))
    # Rows are quantised to int8 where weights are; a cache in bf16 is all that is left elsewhere. In some rows that
    # tips the balance between two experts.
    errors = (native - reference).abs().amax(-1)
    error = errors.quantile(0.7) if family == "qwen3_moe" else errors.max()
    assert error < (0.02 if form in ("F32", "BF16") else 0.2) * reference.abs().max()


@needs_library
def test_a_cache_of_int8_is_near_the_reference(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("qwen3", head_dim=32), formats="F32")
    native, reference = run_both(path, kv_cache_dtype="int8")
    assert (native - reference).abs().max() < 0.05 * reference.abs().max()


@needs_library
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_row_depends_on_nothing_beside_it(tmp_path: Path, family: str) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_model(family, head_dim=32), formats="Q4_0"))
    model = build_model(checkpoint.config)
    # Fewer rows than some steps have: the program is made anew for them.
    config = EngineConfig(numerics="native", threads=2, max_num_batched_tokens=8, max_num_seqs=4)
    device, _ = choose_device(config, model, checkpoint)
    assert isinstance(device, NativeCpuDevice)
    report = check_invariance(model, device)
    assert report.ok, report.differences
    assert len(report.ways) == 5 + len(device.lower_sets)


@needs_library
def test_an_instruction_set_that_gives_other_bits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_model(head_dim=32), formats="Q4_0"))
    model = build_model(checkpoint.config)
    device, _ = choose_device(EngineConfig(numerics="native", threads=1), model, checkpoint)
    assert isinstance(device, NativeCpuDevice)
    if not device.lower_sets:
        pytest.skip("this processor has one instruction set")
    run = NativeStep.run

    def wrong(step: NativeStep, batch: StepBatch) -> torch.Tensor:
        return run(step, batch) + (1e-6 if device.library.isa == 0 else 0.0)

    monkeypatch.setattr(NativeStep, "run", wrong)
    report = check_invariance(model, device, rounds=1)
    assert [difference.way for difference in report.differences] == [
        "batched in random chunks with portable instructions"
    ]
    assert report.differences[0].first_op is None


@needs_library
def test_heads_that_the_kernels_do_not_take_are_a_reason(tmp_path: Path) -> None:
    device, why = chosen(write_folder(tmp_path / "m", tiny_model(head_dim=24)))
    assert isinstance(device, CpuDevice)
    assert why == "reference: heads are 24 wide; the native step takes multiples of 32 up to 256"


@needs_library
def test_a_program_that_the_library_refuses_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ProgramRefused("the native step refuses the program: too wide")

    monkeypatch.setattr("slipstream.devices.native_cpu.NativeProgram", refuse)
    path = write_folder(tmp_path / "m", tiny_model(head_dim=32))
    assert chosen(path)[1] == "reference: the native step refuses the program: too wide"
    with pytest.raises(ConfigError, match="too wide"):
        chosen(path, numerics="native")


def test_every_instruction_set_has_a_name() -> None:
    assert ISAS == ("portable", "avx2", "avx512")
