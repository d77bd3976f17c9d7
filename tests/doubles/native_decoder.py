"""A small decoder as a native program, with every instruction that the executor knows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from doubles.native_programs import Builder


@dataclass
class Shape:
    """A decoder's sizes, and how its weights and caches are stored. `fused`: qkv and gateup instead of their parts."""

    kind: str = "q4_1"
    cache: str = "bf16"
    layers: int = 2
    hidden: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    width: int = 32
    vocabulary: int = 50
    window: int = 0
    fused: bool = True
    head_norms: bool = False
    biases: bool = False
    experts: int = 0

    @property
    def caches(self) -> list[tuple[str, int, int]]:
        """What `Plan` wants to know of the caches."""
        return [(self.cache, self.kv_heads, self.width)] * self.layers


class Decoder:
    """The program of a `Shape`; `built` has its text and weights."""

    def __init__(self, rng: np.random.Generator, shape: Shape, max_rows: int = 64) -> None:
        self.shape, self.built = shape, Builder(rng, max_rows)
        b, s = self.built, shape
        self._small = "f32" if s.kind in ("bf16", "f32") else "q8"
        self.x, self._table = b.buffer(s.hidden), b.buffer(s.width)
        self._normed, self._plain = b.buffer(s.hidden, self._small), b.buffer(s.hidden)
        self._query, self._key, self._value = (b.buffer(heads * s.width) for heads in (s.heads, s.kv_heads, s.kv_heads))
        self._mixed = b.buffer(s.heads * s.width, self._small)
        self._inner = b.buffer(s.inner, self._small)
        self._gate, self._up, self._gated = (b.buffer(s.inner) for _ in range(3))
        last, wanted = b.buffer(s.hidden, rows="wanted"), b.buffer(s.hidden, self._small, rows="wanted")
        frequency = (1e4 ** (-np.arange(s.width // 2) * 2 / s.width)).astype(np.float32)
        b.do("embed", out=self.x, weight=b.weight(s.kind, s.vocabulary, s.hidden, size=1.0))
        b.do("rope_table", out=self._table, inv_freq=b.vector(len(frequency), values=frequency), scale="1.0")
        for _ in range(s.layers):
            self._attention()
            self._experts() if s.experts else self._feed_forward()
        b.do("select", **{"in": self.x}, out=last)
        b.do("norm", **{"in": last}, out=wanted, weight=b.vector(s.hidden), eps="1e-05")
        b.do("linear", **{"in": wanted}, out=-1, weight=b.weight(s.kind, s.vocabulary, s.hidden))

    def _attention(self) -> None:
        b, s = self.built, self.shape
        cache = b.cache(s.cache, s.kv_heads, s.width)
        b.do("norm", **{"in": self.x}, out=self._normed, weight=b.vector(s.hidden), eps="1e-05")
        sizes = {"q": s.heads, "k": s.kv_heads, "v": s.kv_heads}
        weights = {name: b.weight(s.kind, heads * s.width, s.hidden) for name, heads in sizes.items()}
        biases = {name: b.vector(heads * s.width) if s.biases else None for name, heads in sizes.items()}
        norms = {name: b.vector(s.width) if s.head_norms else None for name in "qk"}
        shape = {"heads": s.heads, "kv_heads": s.kv_heads, "width": s.width}
        if s.fused:
            extra = {f"{name}_bias": bias for name, bias in biases.items()}
            extra |= {f"{name}_norm": norm for name, norm in norms.items()}
            eps = "1e-06" if s.head_norms else None
            where = {"table": self._table, "query": self._query, "cache": cache}
            b.do("qkv", **{"in": self._normed}, **weights, **extra, eps=eps, **shape, **where)
        else:
            outs = {"q": self._query, "k": self._key, "v": self._value}
            for name, out in outs.items():
                b.do("linear", **{"in": self._normed}, out=out, weight=weights[name], bias=biases[name])
            for name, heads in (("q", s.heads), ("k", s.kv_heads)):
                turn = {"in": outs[name], "out": outs[name], "heads": heads}
                if norms[name] is not None:
                    b.do("norm", **turn, weight=norms[name], eps="1e-06")
                b.do("rope", **turn, width=s.width, table=self._table)
            b.do("write_kv", key=self._key, value=self._value, cache=cache)
        scale = float(s.width**-0.5).hex()
        b.do("attend", query=self._query, out=self._mixed, cache=cache, **shape, scale=scale, window=s.window)
        weight = b.weight(s.kind, s.hidden, s.heads * s.width)
        if s.fused:
            b.do("linear", **{"in": self._mixed}, out=self.x, weight=weight, add=self.x)
        else:
            b.do("linear", **{"in": self._mixed}, out=self._plain, weight=weight)
            b.do("add", a=self.x, b=self._plain, out=self.x)

    def _feed_forward(self) -> None:
        b, s = self.built, self.shape
        gate, up = (b.weight(s.kind, s.inner, s.hidden) for _ in range(2))
        down = b.weight(s.kind, s.hidden, s.inner)
        if s.fused:
            b.do("norm", **{"in": self.x}, out=self._normed, weight=b.vector(s.hidden), eps="1e-05")
            b.do("gateup", **{"in": self._normed}, gate=gate, up=up, out=self._inner)
        else:
            b.do("norm", **{"in": self.x}, out=self._plain, weight=b.vector(s.hidden), eps="1e-05")
            if self._small == "q8":
                b.do("quant", **{"in": self._plain}, out=self._normed)
            source = self._normed if self._small == "q8" else self._plain
            b.do("linear", **{"in": source}, out=self._gate, weight=gate)
            b.do("linear", **{"in": source}, out=self._up, weight=up)
            b.do("silu_mul", gate=self._gate, up=self._up, out=self._gated)
            if self._small == "q8":
                b.do("quant", **{"in": self._gated}, out=self._inner)
        inner = self._inner if s.fused or self._small == "q8" else self._gated
        b.do("linear", **{"in": inner}, out=self.x, weight=down, add=self.x)

    def _experts(self) -> None:
        b, s = self.built, self.shape
        b.do("norm", **{"in": self.x}, out=self._plain, weight=b.vector(s.hidden), eps="1e-05")
        weights = {"router": b.weight("f32", s.experts, s.hidden)}
        for name, outputs, inputs in (
            ("gate", s.inner, s.hidden),
            ("up", s.inner, s.hidden),
            ("down", s.hidden, s.inner),
        ):
            weights[name], *_ = [b.weight(s.kind, outputs, inputs) for _ in range(s.experts)]
        mixed = b.buffer(s.hidden)
        b.do("moe", **{"in": self._plain}, out=mixed, **weights, experts=s.experts, top_k=2, renormalise=1)
        b.do("add", a=self.x, b=mixed, out=self.x)


SHAPES = {
    "fused": Shape(),
    "parts": Shape(kind="q8_0", cache="int8", fused=False, head_norms=True, biases=True),
    "experts": Shape(kind="q4_0", experts=5, head_norms=True, kv_heads=1, window=40),
    "k-quants": Shape(kind="q4_k", hidden=256, inner=256, heads=8, cache="int8", biases=True),
    "six-bit": Shape(kind="q6_k", hidden=256, inner=256, heads=8, layers=1, fused=False),
    "five-bit": Shape(kind="q8_1", inner=40, heads=9, kv_heads=3, layers=1),
    "five-bit-k": Shape(kind="q8_f", heads=6, kv_heads=2, width=64, layers=1),
    "bf16": Shape(kind="bf16", hidden=48, inner=75, width=64, biases=True, experts=3),
    "f32": Shape(kind="f32", hidden=50, inner=33, fused=False, window=17),
}
"""Together they hold every instruction and every kind of weight and cache."""
