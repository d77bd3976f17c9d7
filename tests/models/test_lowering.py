"""A lowered program computes what the model computes, for every family and setting."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from reference_models import VARIANTS, config_values
from torch import Tensor

from doubles.program_interpreter import Interpreter
from slipstream import ops
from slipstream.core.batch import StepBatch
from slipstream.devices.lower import lower
from slipstream.devices.not_lowerable import NotLowerable
from slipstream.devices.record import record
from slipstream.devices.reference_calls import ReferenceCall, needed_inputs
from slipstream.devices.stored import Stored
from slipstream.devices.tiled_step import TiledStep
from slipstream.kernels.cpu.program import Program
from slipstream.models.decoder import Decoder
from slipstream.models.registry import build_model
from slipstream.ops.rows import Rows

PAGE = 16
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}


def build(name: str, shape: int) -> tuple[Decoder, dict[str, Tensor]]:
    """A model with random weights, and its tensors under the names of a checkpoint."""
    values = config_values(VARIANTS[name], shape)
    model = build_model({**values, "architectures": [f"{CLASSES[VARIANTS[name].family]}ForCausalLM"]})
    generator = torch.Generator().manual_seed(shape)
    for path, parameter in list(model.named_parameters()):
        values_ = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        owner, _, leaf = path.rpartition(".")
        filled = values_ + (1.0 if "norm" in path else 0.0)
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(filled, requires_grad=False))
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {"buffer.inv_freq": model.inv_freq}
    for stored, slot in model.checkpoint_table().items():
        whole = parameters[slot.parameter]
        tensors[stored] = whole if slot.index is None else whole[slot.index]
    return model, tensors


def stored_as(model: Decoder, form: Callable[[str], str]) -> dict[str, list[Stored]]:
    parameters = dict(model.named_parameters())
    found: dict[str, list[Stored]] = {}
    for name, slot in model.checkpoint_table().items():
        shape = parameters[slot.parameter].shape
        part = Stored(name, form(name), tuple(shape if slot.index is None else shape[1:]))
        found.setdefault(slot.parameter, []).append(part)
    return found


def compare(model: Decoder, program: Program, tensors: dict[str, Tensor], run: Any = None) -> None:
    """Run a prompt and a mixed batch both ways."""
    draw = random.Random(1)
    pages = np.array([3, 1, 4, 2], np.int32)
    interpreter = Interpreter(program.text(), tensors, 6, PAGE)
    interpreter.run_reference = run
    step = TiledStep(model, [torch.zeros(spec.shape(6, PAGE)) for spec in model.cache_specs()])
    batch = StepBatch(max_rows=64, max_sequences=2, max_pages=4, page_size=PAGE)
    done = [0, 0]
    for counts in ((20, 0), (1, 7), (1, 1)):
        batch.clear()
        for sequence, count in enumerate(counts):
            if count:
                number = batch.add_sequence(pages[sequence * 2 : sequence * 2 + 2], done[sequence] + count)
                tokens = [draw.randrange(model.vocab_size) for _ in range(count)]
                wants = [draw.random() < 0.3 for _ in range(count - 1)] + [True]
                batch.add_rows(number, tokens, done[sequence], wants_logits=wants)
                done[sequence] += count
        torch.testing.assert_close(interpreter.run(batch), step.run(batch), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_program_computes_what_the_model_computes(name: str, form: str) -> None:
    model, tensors = build(name, len(name) % 3)
    program = lower(record(model, model.cache_specs()), stored_as(model, lambda _: form))
    assert not program.references
    compare(model, program, tensors)


def test_a_dense_model_is_seven_instructions_a_layer() -> None:
    model, _ = build("llama", 1)
    program = lower(record(model, model.cache_specs()), stored_as(model, lambda _: "Q4_0"))
    names = [instruction.name for instruction in program.code]
    layer = ["norm", "qkv", "attend", "linear", "norm", "gateup", "linear"]
    head = ["norm", "qkv", "attend", "select", "quant", "select", "linear", "norm", "gateup", "linear"]
    assert names == ["rope_table", "embed", *layer * 2, *head, "norm", "linear"]
    assert len(program.buffers) < 20


def test_projections_that_take_rows_in_different_forms_are_not_fused() -> None:
    model, tensors = build("qwen3", 1)
    mixed = stored_as(model, lambda name: "F32" if "v_proj" in name or "up_proj" in name else "Q8_0")
    program = lower(record(model, model.cache_specs()), mixed)
    names = {instruction.name for instruction in program.code}
    assert not names & {"qkv", "gateup"}
    assert names >= {"rope", "write_kv", "silu_mul", "quant"}
    compare(model, program, tensors)


def test_recording_leaves_the_model_as_it_was() -> None:
    model, _ = build("llama", 0)
    before = {name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    record(model, model.cache_specs())
    assert {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())} == before


def test_quantization_is_for_plain_projections_and_the_head() -> None:
    model, _ = build("qwen3_moe", 0)
    calls = record(model, model.cache_specs())
    for quantization, projection in (("int8", "q8_0"), ("int4", "q4_1")):
        program = lower(calls, stored_as(model, lambda _: "BF16"), quantization=quantization)
        kinds = {weight.name: weight.kind for weight in program.weights}
        assert kinds["lm_head.weight"] == "q8_0"
        assert kinds["model.embed_tokens.weight"] == "bf16"
        assert kinds["model.layers.0.mlp.gate.weight"] == "bf16"
        assert kinds["model.layers.0.self_attn.q_proj.weight"] == projection
        assert kinds["model.layers.0.mlp.experts.1.down_proj.weight"] == projection
    program = lower(calls, stored_as(model, lambda _: "Q4_0"), quantization="int8")
    assert {weight.kind for weight in program.weights} == {"q4_0"}


class _Odd(Decoder):
    """A model with operators that have no instruction: a scaled residual stream, tanh, and capped logits."""

    def forward(self, rows: Rows, caches: list[Tensor]) -> Tensor:
        table = ops.rope_table(rows.position, self.inv_freq, self.rope_scale) * 1.0
        x = self.embed_tokens.forward(rows.token) * 3.0
        for index, layer in enumerate(self._layers()):
            x, caches[index] = layer.forward(x, table, rows, caches[index])
            x = torch.tanh(x) + x * self.norm.weight
        return self.norm.forward(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.tanh(super().logits(hidden) / 5.0) * 5.0


def test_operators_without_an_instruction_run_in_between() -> None:
    model, tensors = build("qwen2", 1)
    odd = _Odd(model.config)
    odd.load_state_dict(model.state_dict(), assign=True)
    odd.inv_freq = model.inv_freq
    program = lower(record(odd, odd.cache_specs()), stored_as(odd, lambda _: "Q8_0"))
    assert {reference["op"] for reference in program.references} >= {"aten.tanh.default", "aten.mul.Tensor"}
    inputs = {f"parameter.{name}": tensor for name, tensor in odd.named_parameters()}
    assert needed_inputs(program.references) == {"parameter.norm.weight"}

    def run(description: dict[str, Any], given: list[Tensor]) -> Tensor:
        rows = given[0].shape[0]
        return ReferenceCall(description, inputs).run(given, rows, lambda name: pytest.fail(name))

    compare(odd, program, tensors, run)


class _Refused(Decoder):
    """What cannot be lowered: each `way` for another reason."""

    way = ""

    def forward(self, rows: Rows, caches: list[Tensor]) -> Tensor:
        hidden = super().forward(rows, caches)
        match self.way:
            case "data":
                return hidden * float(rows.position.max().item())
            case "cache":
                return hidden + caches[0].sum()
            case "in place":
                return hidden.mul_(2.0)
            case "mixed rows":
                return hidden.reshape(-1, 2).exp().reshape(hidden.shape)
            case _:
                return hidden + rows.token.sum()


@pytest.mark.parametrize("way", ["data", "cache", "in place", "mixed rows", "no rows"])
def test_a_step_that_cannot_be_lowered_says_why(way: str) -> None:
    model, _ = build("llama", 0)
    odd = _Refused(model.config)
    odd.way = way
    with pytest.raises(NotLowerable):
        lower(record(odd, odd.cache_specs()), stored_as(odd, lambda _: "F32"))


def test_formats_without_a_kernel_run_in_between() -> None:
    model, tensors = build("llama", 0)
    program = lower(record(model, model.cache_specs()), stored_as(model, lambda n: "F64" if "o_proj" in n else "F32"))
    assert [reference["op"] for reference in program.references] == ["slipstream.linear"] * 3
    inputs = {f"parameter.{name}": tensor for name, tensor in model.named_parameters()}

    def run(description: dict[str, Any], given: list[Tensor]) -> Tensor:
        return ReferenceCall(description, inputs).run(given, given[0].shape[0], lambda name: pytest.fail(name))

    compare(model, program, tensors, run)
