"""Keys of the sampling noise: 64 bits per (seed, choice, position), mixed on the host in Python integers.

The noise itself is `slipstream.ops.noise`. A drafter that draws with the row's key draws the same noise.
"""

from __future__ import annotations

from slipstream.ops.noise import gumbel, token_hash

__all__ = ["choice_key", "gumbel", "row_key", "splitmix64", "token_hash"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_CHOICE = 0xD1342543DE82EF95


def splitmix64(x: int) -> int:
    """One step of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers in which every bit moves all."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def choice_key(seed: int, choice_index: int) -> int:
    """The 64-bit key of one choice of a request. `seed` is taken modulo 2**64."""
    return splitmix64(splitmix64(seed & _MASK) ^ (choice_index * _CHOICE & _MASK))


def row_key(choice: int, position: int) -> tuple[int, int]:
    """The two 32-bit halves (key0, key1) for the row that samples the token at absolute index `position` (0 or more).

    `choice` is from `choice_key`. The position is mixed before it meets the key, so that two sequences never walk
    through the same keys at a distance.
    """
    key = splitmix64(choice ^ splitmix64(position))
    return key & 0xFFFFFFFF, key >> 32
