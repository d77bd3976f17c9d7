"""A layer's pages of keys and values as bytes.

A page of T tokens holds, for each key/value head: keys [D][T], values [T][D] (bfloat16), or int8 keys [D][T], int8
values [T][D], float32 scales of the keys [T], float32 scales of the values [T].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.ops.native_spec.arithmetic import F32, I32, from_bf16, to_bf16
from slipstream.ops.native_spec.quantise import to_int8


def page_bytes(kind: str, heads: int, width: int, tokens: int) -> int:
    """Bytes of one page."""
    return heads * tokens * (4 * width if kind == "bf16" else 2 * width + 8)


@dataclass
class Pages:
    """Views on `data` (uint8, whole pages): keys [P, G, D, T], values [P, G, T, D]; of int8 their scales [P, G, T]."""

    kind: str
    heads: int
    width: int
    tokens: int
    data: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        size = self.width * self.tokens * (2 if self.kind == "bf16" else 1)
        heads = self.data.reshape(-1, self.heads, page_bytes(self.kind, 1, self.width, self.tokens))
        dtype: type[np.generic] = np.uint16 if self.kind == "bf16" else np.int8
        self.keys: npt.NDArray[Any] = heads[..., :size].view(dtype).reshape(*heads.shape[:2], self.width, self.tokens)
        self.values: npt.NDArray[Any] = (
            heads[..., size : 2 * size].view(dtype).reshape(*heads.shape[:2], self.tokens, self.width)
        )
        if self.kind == "int8":
            scales = heads[..., 2 * size :].view(np.float32)
            self.key_scales, self.value_scales = scales[..., : self.tokens], scales[..., self.tokens :]

    def write(self, key: F32, value: F32, slot: I32) -> None:
        """Store one token per row: key and value [R, G * D], slot [R] = page * T + place in the page.

        bfloat16 by rounding; int8 with one scale per token and head.
        """
        page, place = slot // self.tokens, slot % self.tokens
        split = [x.reshape(len(x), self.heads, self.width) for x in (key, value)]
        for row in range(len(slot)):
            at = (page[row], slice(None), place[row])
            if self.kind == "bf16":
                self.keys[page[row], :, :, place[row]] = to_bf16(split[0][row])
                self.values[at] = to_bf16(split[1][row])
            else:
                self.keys[page[row], :, :, place[row]], self.key_scales[at] = to_int8(split[0][row])
                self.values[at], self.value_scales[at] = to_int8(split[1][row])

    def read(self, slot: I32) -> tuple[F32, F32, F32, F32]:
        """Of slots [n]: unscaled keys and values float32 [n, G, D], and scales of both [n, G] (1 for bfloat16)."""
        page, place = slot // self.tokens, slot % self.tokens
        keys, values = self.keys[page, :, :, place], self.values[page, :, place]
        if self.kind == "bf16":
            one = np.ones(keys.shape[:2], np.float32)
            return from_bf16(keys), from_bf16(values), one, one
        scales = self.key_scales[page, :, place], self.value_scales[page, :, place]
        return keys.astype(np.float32), values.astype(np.float32), *scales
