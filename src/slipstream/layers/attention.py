"""Grouped-query attention over a paged cache."""

from __future__ import annotations

from torch import Tensor, nn

from slipstream import ops
from slipstream.cache.spec import PagedKV
from slipstream.layers.basic import Linear, RMSNorm
from slipstream.ops.rows import Rows


class Attention(nn.Module):
    """Projections to queries, keys and values, optional norms on heads, rope, paged softmax, output projection."""

    def __init__(
        self,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv_bias: bool = False,
        output_bias: bool = False,
        head_norm_eps: float | None = None,
        window: int = 0,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.window = heads, kv_heads, head_dim, window
        self.scale = head_dim**-0.5
        self.q_proj = Linear(hidden, heads * head_dim, qkv_bias)
        self.k_proj = Linear(hidden, kv_heads * head_dim, qkv_bias)
        self.v_proj = Linear(hidden, kv_heads * head_dim, qkv_bias)
        self.o_proj = Linear(heads * head_dim, hidden, output_bias)
        self.q_norm = None if head_norm_eps is None else RMSNorm(head_dim, head_norm_eps)
        self.k_norm = None if head_norm_eps is None else RMSNorm(head_dim, head_norm_eps)

    def cache_spec(self) -> PagedKV:
        return PagedKV(self.kv_heads, self.head_dim, self.window)

    def forward(self, x: Tensor, table: Tensor, rows: Rows, cache: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, hidden], table from `ops.rope_table`, the layer's cache -> ([R, hidden], the cache)."""
        query = self.q_proj.forward(x).unflatten(-1, (self.heads, self.head_dim))
        key = self.k_proj.forward(x).unflatten(-1, (self.kv_heads, self.head_dim))
        value = self.v_proj.forward(x).unflatten(-1, (self.kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm.forward(query), self.k_norm.forward(key)
        query, key = ops.rope(query, table), ops.rope(key, table)
        cache = ops.write_kv(cache, key, value, rows.slot)
        mixed = ops.paged_attention(
            query, cache, rows.page_table, rows.sequence, rows.position, self.scale, self.window
        )
        return self.o_proj.forward(mixed.flatten(-2)), cache
