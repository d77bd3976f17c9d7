"""A native program for people: a line per instruction, and what a step of one row reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slipstream.kernels.cpu.program import LOGITS, WEIGHT_FIELDS, Instruction, Program

_VECTOR_FIELDS = ("bias", "q_bias", "k_bias", "v_bias", "gate_bias", "up_bias", "q_norm", "k_norm", "inv_freq")

_INSTRUCTIONS = {
    "embedding": ("embed",),
    "linear": ("linear", "qkv", "gateup"),
    "moe": ("moe",),
    "paged_attention": ("attend",),
    "rms_norm": ("norm", "qkv"),
    "rope": ("rope", "qkv"),
    "rope_table": ("rope_table",),
    "silu_mul": ("silu_mul", "gateup"),
    "write_kv": ("write_kv", "qkv"),
}
"""The instructions that an operator can become a part of."""


@dataclass(frozen=True)
class Line:
    """One instruction: what it works on, the kinds of its weights, and the bytes that it reads for one row."""

    number: int
    name: str
    shapes: str
    kinds: str
    bytes: int


def lines_of(program: Program, context: int) -> list[Line]:
    """Every instruction, for a row at position `context` - 1."""
    return [
        Line(
            number,
            each.name,
            _shapes(program, each),
            ", ".join(dict.fromkeys(program.weights[weight].kind for weight in _weights(each))),
            _bytes(program, each, context),
        )
        for number, each in enumerate(program.code)
    ]


def totals(program: Program, context: int) -> dict[str, int]:
    """Bytes that a step of one row reads, by kind of instruction, largest first."""
    found: Counter[str] = Counter()
    for line in lines_of(program, context):
        found[line.name] += line.bytes
    return {name: size for name, size in found.most_common() if size}


def runners(program: Program | None, ops: Iterable[str]) -> dict[str, str]:
    """For each operator what runs it natively: the instructions of this program (None: of any), PyTorch, or both."""
    if program is None:
        return {op: ", ".join(_INSTRUCTIONS.get(op, ())) or "PyTorch" for op in ops} | {"sample": "the native sampler"}
    used = {each.name for each in program.code}
    in_torch = {reference["op"].removeprefix("slipstream.") for reference in program.references}
    found = {}
    for op in ops:
        names = [name for name in _INSTRUCTIONS.get(op, ()) if name in used]
        if op == "rms_norm" and not any("q_norm" in each.fields for each in program.code):
            names = [name for name in names if name != "qkv"]
        found[op] = ", ".join([*names, *(["PyTorch"] if op in in_torch else [])]) or "not in this model"
    return found | {"sample": "the native sampler"}


def as_values(program: Program, context: int) -> dict[str, Any]:
    """The same as plain values."""
    by_name = totals(program, context)
    return {
        "context": context,
        "instructions": [
            {"name": line.name, "shapes": line.shapes, "weights": line.kinds, "bytes": line.bytes}
            for line in lines_of(program, context)
        ],
        "bytes_by_instruction": by_name,
        "bytes_per_step": sum(by_name.values()),
        "packed_bytes": program.data_size,
        "buffer_bytes_per_row": _buffer_bytes(program),
    }


def _buffer_bytes(program: Program) -> int:
    slots: dict[int, int] = {}
    for buffer in program.buffers:
        slots[buffer.slot] = max(slots.get(buffer.slot, 0), buffer.row_bytes)
    return sum(slots.values())


def _weights(instruction: Instruction) -> list[int]:
    return [instruction.number(key) for key in WEIGHT_FIELDS.get(instruction.name, ())]


def _shapes(program: Program, instruction: Instruction) -> str:
    """Widths of what goes in and comes out; for experts and heads, how many."""

    def width(number: int) -> str:
        buffer = program.buffers[number]
        return f"{buffer.width} {buffer.kind}"

    reads = dict.fromkeys(map(width, instruction.reads()))
    writes = [width(number) for number in instruction.writes()]
    fields = instruction.fields
    if fields.get("out") == LOGITS and instruction.name == "linear":
        writes = [f"{program.weights[instruction.number('weight')].outputs} logits"]
    text = f"{', '.join(reads)} -> {', '.join(writes) or '-'}".removeprefix(" ")
    if instruction.name in ("qkv", "attend"):
        text += f"; {fields['heads']} heads on {fields['kv_heads']} x {fields['width']}"
    if instruction.name == "moe":
        text += f"; {fields['top_k']} of {fields['experts']} experts"
    if instruction.name == "reference":
        text += f"; {program.references[instruction.number('op')]['op']} in torch"
    return text


def _bytes(program: Program, instruction: Instruction, context: int) -> int:
    fields = instruction.fields
    sizes = [program.weights[number].size for number in _weights(instruction)]
    vectors = [instruction.number(key) for key in _VECTOR_FIELDS if key in fields]
    if instruction.name == "norm":
        vectors.append(instruction.number("weight"))
    size = sum(4 * program.vectors[number].count for number in vectors)
    match instruction.name:
        case "embed":
            return size + sizes[0] // program.weights[instruction.number("weight")].outputs
        case "moe":
            return size + sizes[0] + instruction.number("top_k") * sum(sizes[1:])
        case "attend":
            cache = program.caches[instruction.number("cache")]
            seen = min(context, instruction.number("window") or context)
            per_head = 2 * cache.width * 2 if cache.kind == "bf16" else 2 * (cache.width + 4)
            return size + seen * cache.heads * per_head
        case _:
            return size + sum(sizes)
