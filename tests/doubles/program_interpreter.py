"""Runs a native program's text with torch, on unquantised rows: what the instructions mean, in the plainest words.

Buffers of one slot share one place, so that a lifetime that is too short shows itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream import ops
from slipstream.core.batch import StepBatch
from slipstream.kernels.cpu.program import LOGITS, Instruction, Program, parse


class Interpreter:
    """`tensors` gives weights and vectors by their names in the program."""

    def __init__(self, text: str, tensors: Mapping[str, Tensor], pages: int, page_size: int) -> None:
        self.program: Program = parse(text)
        self.weights = [tensors[weight.name] for weight in self.program.weights]
        self.vectors = [tensors[vector.name] for vector in self.program.vectors]
        self.caches = [torch.zeros(pages, c.heads, 2, page_size, c.width) for c in self.program.caches]
        self.slots: dict[int, tuple[int, Tensor]] = {}
        self.logits = torch.empty(0)
        self.run_reference: Callable[[dict[str, Any], list[Tensor]], Tensor] | None = None

    def run(self, batch: StepBatch) -> Tensor:
        """Logits of the rows that want them."""
        self.slots.clear()
        rows = batch.num_rows
        self.rows = {
            name: torch.from_numpy(getattr(batch, name)[:rows]).long()
            for name in ("token", "position", "sequence", "slot")
        }
        self.table = torch.from_numpy(batch.page_table[: batch.num_sequences + 1]).long()
        self.wanted = torch.from_numpy(np.flatnonzero(batch.wants_logits[:rows]))
        self.logits = torch.empty(0)
        for instruction in self.program.code:
            getattr(self, f"_{instruction.name}")(instruction, instruction.fields)
        return self.logits

    def get(self, number: Any) -> Tensor:
        buffer = self.program.buffers[number]
        owner, value = self.slots[buffer.slot]
        assert owner == number, f"buffer {number} was overwritten by {owner}"
        assert value.shape == (len(self.wanted) if buffer.rows == "wanted" else len(self.rows["token"]), buffer.width)
        return value

    def put(self, number: Any, value: Tensor) -> None:
        if number == LOGITS:
            self.logits = value
        else:
            self.slots[self.program.buffers[number].slot] = (number, value)

    def kind(self, number: Any) -> str:
        return self.program.buffers[number].kind

    def _embed(self, i: Instruction, f: dict[str, Any]) -> None:
        self.put(f["out"], self.weights[f["weight"]][self.rows["token"]])

    def _rope_table(self, i: Instruction, f: dict[str, Any]) -> None:
        table = ops.rope_table(self.rows["position"], self.vectors[f["inv_freq"]], f["scale"])
        self.put(f["out"], torch.cat((table[0], table[1]), -1))

    def _turn(self, x: Tensor, heads: int, table: int) -> Tensor:
        cos, sin = self.get(table).chunk(2, -1)
        return ops.rope(x.unflatten(-1, (heads, -1)), torch.stack((cos, sin))).flatten(1)

    def _normed(self, x: Tensor, heads: int, weight: int, eps: float) -> Tensor:
        return ops.rms_norm(x.unflatten(-1, (heads, -1)), self.vectors[weight], eps).flatten(1)

    def _norm(self, i: Instruction, f: dict[str, Any]) -> None:
        assert self.kind(f["in"]) == "f32"
        self.put(f["out"], self._normed(self.get(f["in"]), f.get("heads", 1), f["weight"], f["eps"]))

    def _quant(self, i: Instruction, f: dict[str, Any]) -> None:
        assert (self.kind(f["in"]), self.kind(f["out"])) == ("f32", "q8")
        self.put(f["out"], self.get(f["in"]))

    def _product(self, x: int, weight: int, bias: int | None) -> Tensor:
        integer = self.program.weights[weight].kind not in ("bf16", "f32")
        assert self.kind(x) == ("q8" if integer else "f32")
        return ops.linear(self.get(x), self.weights[weight], None if bias is None else self.vectors[bias])

    def _linear(self, i: Instruction, f: dict[str, Any]) -> None:
        result = self._product(f["in"], f["weight"], f.get("bias"))
        self.put(f["out"], result if "add" not in f else self.get(f["add"]) + result)

    def _qkv(self, i: Instruction, f: dict[str, Any]) -> None:
        q, k, v = (self._product(f["in"], f[name], f.get(f"{name}_bias")) for name in "qkv")
        if "q_norm" in f:
            q = self._normed(q, f["heads"], f["q_norm"], f["eps"])
            k = self._normed(k, f["kv_heads"], f["k_norm"], f["eps"])
        query = self._turn(q, f["heads"], f["table"])
        self._write(f["cache"], self._turn(k, f["kv_heads"], f["table"]), v)
        self.put(f["query"], query)

    def _rope(self, i: Instruction, f: dict[str, Any]) -> None:
        self.put(f["out"], self._turn(self.get(f["in"]), f["heads"], f["table"]))

    def _write(self, cache: int, key: Tensor, value: Tensor) -> None:
        heads = self.program.caches[cache].heads
        split = (heads, -1)
        ops.write_kv(self.caches[cache], key.unflatten(-1, split), value.unflatten(-1, split), self.rows["slot"])

    def _write_kv(self, i: Instruction, f: dict[str, Any]) -> None:
        self._write(f["cache"], self.get(f["key"]), self.get(f["value"]))

    def _attend(self, i: Instruction, f: dict[str, Any]) -> None:
        query = self.get(f["query"]).unflatten(-1, (f["heads"], f["width"]))
        rows = (self.rows["sequence"], self.rows["position"])
        cache = self.caches[f["cache"]]
        self.put(f["out"], ops.paged_attention(query, cache, self.table, *rows, f["scale"], f["window"]).flatten(1))

    def _gateup(self, i: Instruction, f: dict[str, Any]) -> None:
        gate = self._product(f["in"], f["gate"], f.get("gate_bias"))
        self.put(f["out"], ops.silu_mul(gate, self._product(f["in"], f["up"], f.get("up_bias"))))

    def _silu_mul(self, i: Instruction, f: dict[str, Any]) -> None:
        self.put(f["out"], ops.silu_mul(self.get(f["gate"]), self.get(f["up"])))

    def _add(self, i: Instruction, f: dict[str, Any]) -> None:
        self.put(f["out"], self.get(f["a"]) + self.get(f["b"]))

    def _select(self, i: Instruction, f: dict[str, Any]) -> None:
        assert self.kind(f["in"]) == self.kind(f["out"]) == "f32"
        self.put(f["out"], self.get(f["in"])[self.wanted])

    def _moe(self, i: Instruction, f: dict[str, Any]) -> None:
        stacks = [torch.stack(self.weights[f[key] : f[key] + f["experts"]]) for key in ("gate", "up", "down")]
        router = self.weights[f["router"]]
        x = self.get(f["in"])
        self.put(f["out"], ops.moe(x, router, *stacks, f["top_k"], bool(f["renormalise"])))

    def _reference(self, i: Instruction, f: dict[str, Any]) -> None:
        assert self.run_reference is not None
        given = [self.get(number) for number in i.reads()]
        self.put(f["out"], self.run_reference(self.program.references[f["op"]], given))
