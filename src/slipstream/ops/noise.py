"""Gumbel noise as a pure function of a row's key and a token id, the same integers on every chip.

A key is two 32-bit integers (see `slipstream.sampling.noise`). A token's hash is two rounds of a 32-bit finaliser; only
sums, products, xors and shifts of 32-bit integers occur. The finaliser is a bijection, so no two tokens of a row
share a hash. Constants: Chris Wellons, hash-prospector (public domain), "two round", bias 0.107; both multipliers
are below 2**31, so that int64 products stay below 2**63 and int64 arithmetic can stand in for uint32.

The hash h gives u = (h + 0.5) / 2**32, the exponential -log1p(-u) and the Gumbel value -log(-log1p(-u)). The form
matters: sampling needs large Gumbel values to be fine, and these come from small u, where a float32 is finest. The
largest value is 33 log 2 = 22.9 (of probability 2**-32), the smallest -2.8 (u is held below 1 by the last float32).
Hence a token's chance is off by at most about 2**-32, and tokens less likely than that are drawn yet more rarely.
"""

from __future__ import annotations

import torch

from slipstream.ops.fixed import log, log1p

MASK = 0xFFFFFFFF
FIRST = 0x21F0AAAD
SECOND = 0x735A2D97
UNIT = 2.0**-32
LARGEST_UNIFORM = 1.0 - 2.0**-24


def _finalise(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit integers (held in int64)."""
    x = ((x ^ (x >> 16)) * FIRST) & MASK
    x = ((x ^ (x >> 15)) * SECOND) & MASK
    return x ^ (x >> 15)


def token_hash(key0: torch.Tensor, key1: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """32-bit hashes (int64) of `tokens` under keys; the three int64 tensors broadcast."""
    return _finalise(_finalise((tokens + key0) & MASK) ^ key1)


def gumbel_of_hash(hashed: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel values, float32, of 32-bit hashes (int64)."""
    uniform = ((hashed.to(torch.float32) + 0.5) * UNIT).clamp(max=LARGEST_UNIFORM)
    return -log(-log1p(-uniform))


def gumbel(key0: torch.Tensor, key1: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, of `tokens` under keys; the three int64 tensors broadcast."""
    return gumbel_of_hash(token_hash(key0, key1, tokens))
