"""What a layer keeps per sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values in pages of T tokens: one tensor [pages, kv_heads, 2, T, head_dim] per layer.

    `window` > 0: a position sees only that many positions, its own included; 0: all before it.
    """

    kv_heads: int
    head_dim: int
    window: int = 0

    def shape(self, pages: int, page_size: int) -> tuple[int, ...]:
        """The shape of the layer's cache tensor for `pages` pages."""
        return (pages, self.kv_heads, 2, page_size, self.head_dim)

    def page_elements(self, page_size: int) -> int:
        """Elements that one page takes in this layer."""
        return self.kv_heads * 2 * page_size * self.head_dim


CacheSpec = PagedKV
"""The kinds of cache a layer may ask for."""


def longest_window(specs: list[CacheSpec]) -> int:
    """Positions that any layer may still look back on, its own included; 0 when some layer sees everything."""
    windows = [spec.window for spec in specs]
    return 0 if not windows or 0 in windows else max(windows)
