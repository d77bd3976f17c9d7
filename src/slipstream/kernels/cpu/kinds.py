"""How the CPU's native step stores weights: the kinds, and what a tile of each takes.

A tile is 16 outputs. It holds the quants of all its blocks of 32 inputs, then the scales of all blocks; each of the
two sections is filled up to 64 bytes. Outputs are filled up to 16 and inputs to 32 (256 where scales are in two levels)
with weights of value zero.
"""

from __future__ import annotations

from dataclasses import dataclass

OUTPUTS = 16
"""Outputs in a tile."""
BLOCK = 32
"""Inputs in a block."""
ALIGNMENT = 64


@dataclass(frozen=True)
class Kind:
    """A way to store weights. Sizes are bytes per tile and block of 32 inputs.

    `integer`: inputs are quantised to int8 first. `group`: blocks that share scales, and to which inputs are filled up;
    `shared` are the bytes that such a group has beside its blocks' own scales.
    """

    name: str
    integer: bool
    quants: int
    scales: int
    group: int = 1
    shared: int = 0

    def blocks(self, inputs: int) -> int:
        """Blocks of a row, fillers counted in."""
        step = BLOCK * self.group
        return -(-inputs // step) * self.group

    def sections(self, inputs: int) -> tuple[int, int]:
        """Bytes of a tile's quants and of its scales, each filled up to 64."""
        blocks = self.blocks(inputs)
        scales = blocks * self.scales + blocks // self.group * self.shared
        return _filled(blocks * self.quants), _filled(scales)

    def size(self, outputs: int, inputs: int) -> int:
        """Bytes of a weight."""
        return -(-outputs // OUTPUTS) * sum(self.sections(inputs))


def _filled(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


KINDS = {
    kind.name: kind
    for kind in (
        Kind("q4_0", True, 256, 32),
        Kind("q4_1", True, 256, 64),
        Kind("q8_0", True, 512, 32),
        Kind("q8_1", True, 512, 64),
        Kind("q8_f", True, 512, 128),
        Kind("q4_k", True, 256, 32, group=8, shared=64),
        Kind("q6_k", True, 384, 32, group=8, shared=32),
        Kind("bf16", False, 1024, 0),
        Kind("f32", False, 2048, 0),
    )
}

KIND_OF_FORMAT = {
    "Q4_0": "q4_0",
    "Q4_1": "q4_1",
    "Q5_0": "q8_0",
    "Q5_1": "q8_1",
    "Q8_0": "q8_0",
    "Q4_K": "q4_k",
    "Q5_K": "q8_f",
    "Q6_K": "q6_k",
    "BF16": "bf16",
    "F16": "f32",
    "F32": "f32",
}
"""The kind that keeps every value of a checkpoint's format."""
PLAIN_FORMATS = ("BF16", "F16", "F32")
"""Formats that are not quantised, so that `quantization` may choose another kind for them."""
