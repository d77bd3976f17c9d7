"""Every family's step is the same list of ops whatever the number of rows, and nothing in it depends on data.

The model runs on fake tensors, which have shapes and no values: reading one (`.item()`, a branch, a mask of unknown
size) raises. Two row counts give two lists of op calls; they may differ in the row count alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_models import VARIANTS, config_values
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream import ops
from slipstream.models.decoder import Decoder
from slipstream.models.registry import build_model
from slipstream.ops.rows import Rows

ROW_COUNTS = (16, 32, 4177)
"""The tile, its double, and a prime that no other dimension of a model here is a multiple of."""

ALLOWED_ATEN = {"aten.add.Tensor", "aten.view.default", "aten._to_copy.default"}
"""Residual sums, heads apart and together, logits to float32; all else is to be an op of ours."""


class Recorder(TorchDispatchMode):
    """Writes down every op that the model calls: its name, and what it is given and gives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("aten", "slipstream"):  # others only ask for a tensor's attributes
            self.calls.append((str(func), describe((args, kwargs or {})), describe(result)))
        return result


def describe(value: Any) -> Any:
    """Tensors become their dtype and shape, containers and numbers stay."""
    if isinstance(value, Tensor):
        return (str(value.dtype), *value.shape)
    if isinstance(value, list | tuple):
        return tuple(describe(each) for each in value)
    if isinstance(value, dict):
        return tuple((key, describe(each)) for key, each in sorted(value.items()))
    return value if isinstance(value, int | float | bool | None) else str(value)


def with_rows_named(value: Any, rows: int) -> Any:
    if isinstance(value, tuple):
        return tuple(with_rows_named(each, rows) for each in value)
    return "R" if isinstance(value, int) and not isinstance(value, bool) and value == rows else value


def build(name: str) -> Decoder:
    classes = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
    variant = VARIANTS[name]
    return build_model({**config_values(variant, 1), "architectures": [f"{classes[variant.family]}ForCausalLM"]})


def trace(model: Decoder, rows: int) -> list[tuple[str, Any, Any]]:
    """The calls of one step of `rows` rows, the row count replaced by "R"."""
    with FakeTensorMode(allow_non_fake_inputs=False), torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                fake = torch.empty(parameter.shape, dtype=torch.bfloat16)
                setattr(module, name, torch.nn.Parameter(fake, requires_grad=False))
        model.inv_freq = torch.empty(model.inv_freq.shape)
        caches = [torch.empty(spec.shape(23, 16), dtype=torch.bfloat16) for spec in model.cache_specs()]
        per_row = [torch.empty(rows, dtype=torch.int64) for _ in range(6)]
        table, context = torch.empty(5, 11, dtype=torch.int64), torch.empty(5, dtype=torch.int64)
        with Recorder() as recorder:
            hidden = model.forward(Rows(*per_row, page_table=table, context_len=context), caches)
            logits = model.logits(hidden)
    assert hidden.shape == (rows, model.config.hidden)
    assert (logits.shape, logits.dtype) == ((rows, model.vocab_size), torch.float32)
    return [with_rows_named(call, rows) for call in recorder.calls]


@pytest.mark.parametrize("name", VARIANTS)
def test_step_is_the_same_for_any_number_of_rows(name: str) -> None:
    lists = [trace(build(name), rows) for rows in ROW_COUNTS]
    names = [[call[0] for call in calls] for calls in lists]
    assert names[0] == names[1] == names[2]
    # 16 and 32 may also be a head's width or a page; the prime names the rows alone, the others must fit it.
    for small, prime in zip(lists[0] + lists[1], lists[2] * 2, strict=True):
        assert fits(small, prime)


def fits(found: Any, wanted: Any) -> bool:
    """Whether two calls are equal but for numbers that became "R" for happening to equal the row count."""
    if isinstance(found, tuple) and isinstance(wanted, tuple):
        return len(found) == len(wanted) and all(map(fits, found, wanted))
    return found == wanted or (found == "R" and wanted in (16, 32))


@pytest.mark.parametrize("name", VARIANTS)
def test_step_calls_our_ops_and_plain_arithmetic_only(name: str) -> None:
    calls = {call[0] for call in trace(build(name), 16)}
    ours = {call for call in calls if call.startswith("slipstream.")}
    assert {f"slipstream.{op}.default" for op in ops.OPS} >= ours
    assert calls - ours <= ALLOWED_ATEN


def test_caches_are_written_once_per_layer_and_rebound() -> None:
    calls = [call[0] for call in trace(build("qwen3"), 16)]
    assert calls.count("slipstream.write_kv.default") == 3
    assert calls.count("slipstream.paged_attention.default") == 3


def test_tracing_refuses_a_step_that_reads_data() -> None:
    model = build("llama")
    good = model.forward

    def forward(rows: Rows, caches: list[Tensor]) -> Tensor:
        return good(rows, caches) * int(rows.position.max().item())

    model.forward = forward  # type: ignore[method-assign]
    with pytest.raises((RuntimeError, GuardOnDataDependentSymNode)):
        trace(model, 16)


def test_tracing_detects_a_step_that_depends_on_the_row_count() -> None:
    def traced(rows: int) -> list[tuple[str, Any, Any]]:
        model = build("llama")
        good = model.forward

        def forward(batch: Rows, caches: list[Tensor]) -> Tensor:
            hidden = good(batch, caches)
            return hidden + hidden if batch.token.shape[0] > 16 else hidden

        model.forward = forward  # type: ignore[method-assign]
        return trace(model, rows)

    assert [call[0] for call in traced(16)] != [call[0] for call in traced(32)]
