"""Writing keys and values into a layer's pages."""

from __future__ import annotations

from torch import Tensor

from slipstream.ops.registry import define


def _fake(cache: Tensor, key: Tensor, value: Tensor, slot: Tensor) -> Tensor:
    return cache


@define("write_kv(Tensor(a!) cache, Tensor key, Tensor value, Tensor slot) -> Tensor(a!)", fake=_fake)
def write_kv(cache: Tensor, key: Tensor, value: Tensor, slot: Tensor) -> Tensor:
    """Write one key and one value per row at cache row `slot`, and return the cache.

    cache [P, G, 2, T, D] (keys, then values), key and value [R, G, D], slot [R] = page * T + offset. Rows with slot 0
    write into the scratch page; if several do, which one stays is not defined.
    """
    tokens = cache.shape[3]
    page, offset = slot // tokens, slot % tokens
    cache[page, :, 0, offset] = key.to(cache.dtype)
    cache[page, :, 1, offset] = value.to(cache.dtype)
    return cache
