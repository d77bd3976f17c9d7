"""The pages of sequences: matched against the prefix tree, grown, committed to it, and given back."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from slipstream.cache.pages import PagePool
from slipstream.cache.prefix_tree import Node, PrefixTree
from slipstream.core.batch import Int32Array


class SequencePages:
    """The page table of one sequence: its first `len(nodes)` pages belong to the prefix tree, the others to it alone.

    Entries before `start` were freed behind a sliding window and read 0 (scratch). `table` is another array after
    every change, so who has copied it need not do so again while it is the same one.
    """

    __slots__ = ("_table", "namespace", "nodes", "num_pages", "released_nodes", "start", "table")

    def __init__(self, namespace: Hashable = None) -> None:
        self.namespace = namespace
        self._table = np.zeros(8, np.int32)
        self.table: Int32Array = self._table[:0]
        self.num_pages = 0
        self.nodes: list[Node] = []
        self.released_nodes = 0
        self.start = 0

    @property
    def num_held(self) -> int:
        """Pages that were not freed behind the window."""
        return self.num_pages - self.start

    def append(self, page: int) -> None:
        if self.num_pages == len(self._table):
            self._table = np.concatenate((self._table, np.zeros_like(self._table)))
        self._table[self.num_pages] = page
        self.num_pages += 1
        self.table = self._table[: self.num_pages]

    def replace(self, index: int, page: int) -> None:
        self._table[index] = page
        self.table = self._table[: self.num_pages]

    def clear(self) -> None:
        self.nodes = []
        self.num_pages = self.start = self.released_nodes = 0
        self.table = self._table[:0]


class CacheManager:
    """Pages of all sequences. Only the engine thread touches it.

    `window`: positions that any layer still looks back on (0: all); pages wholly behind it are freed.
    """

    def __init__(self, num_pages: int, page_size: int, *, window: int = 0, prefix_caching: bool = True) -> None:
        self.page_size = page_size
        self.window = window
        self.prefix_caching = prefix_caching
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree()

    @property
    def num_available(self) -> int:
        """Pages that could be handed out now: free ones and cached ones that nobody reads."""
        return self.pool.num_free + self.tree.num_unreferenced

    @property
    def num_in_use(self) -> int:
        """Pages that sequences hold."""
        return self.pool.capacity - self.num_available

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.page_size)

    def match(self, pages: SequencePages, tokens: Sequence[int]) -> int:
        """Start a sequence from cached pages that hold its first tokens. -> tokens found, always fewer than all."""
        if not self.prefix_caching:
            return 0
        limit = (len(tokens) - 1) // self.page_size
        nodes = self.tree.match(pages.namespace, self._keys(tokens, 0, limit))
        self.tree.acquire(nodes)
        for node in nodes:
            pages.append(node.page)
        pages.nodes = nodes
        return len(nodes) * self.page_size

    def grow(self, pages: SequencePages, tokens: int) -> bool:
        """Make room for `tokens` tokens in all. -> False when memory is short; what was got stays with the sequence."""
        needed = self.pages_for(tokens)
        while pages.num_pages < needed:
            page = self._take()
            if page is None:
                return False
            pages.append(page)
        return True

    def commit(self, pages: SequencePages, tokens: Sequence[int], computed: int) -> None:
        """Put pages that are full of computed, final tokens into the tree, where others may find them."""
        full = computed // self.page_size
        if not self.prefix_caching or full <= len(pages.nodes):
            return
        for key in self._keys(tokens, len(pages.nodes), full):
            index = len(pages.nodes)
            own = int(pages.table[index])
            node = self.tree.extend(pages.namespace, pages.nodes[-1] if pages.nodes else None, key, own)
            if node is None:
                return
            pages.nodes.append(node)
            if node.page != own:
                # Someone computed the same page first; its bits are the same, so one copy is enough.
                pages.replace(index, node.page)
                self.pool.give_back(own)

    def free_behind_window(self, pages: SequencePages, length: int) -> None:
        """Give back pages that no row at position `length` or later can see."""
        if not self.window:
            return
        keep_from = min(max(0, length - self.window + 1) // self.page_size, pages.num_pages)
        for index in range(pages.start, keep_from):
            if index < len(pages.nodes):
                self._give_back(self.tree.release(pages.nodes[index : index + 1]))
                pages.released_nodes = index + 1
            else:
                self.pool.give_back(int(pages.table[index]))
            pages.replace(index, 0)
        pages.start = max(pages.start, keep_from)

    def release(self, pages: SequencePages) -> None:
        """Give back all that a sequence holds; what the tree holds of it stays findable."""
        for index in range(max(pages.start, len(pages.nodes)), pages.num_pages):
            self.pool.give_back(int(pages.table[index]))
        self._give_back(self.tree.release(pages.nodes[pages.released_nodes :]))
        pages.clear()

    def reset(self) -> None:
        """Forget all sequences and cached pages, whatever state they are in."""
        self.pool = PagePool(self.pool.num_pages)
        self.tree = PrefixTree()

    def clear_prefixes(self) -> None:
        """Forget every cached page that nobody reads."""
        self._give_back(self.tree.clear())

    def _take(self) -> int | None:
        page = self.pool.take()
        if page is not None:
            return page
        evicted = self.tree.evict()
        if evicted is None:
            self._give_back(self.tree.detach_inner())
        else:
            self.pool.give_back(evicted)
        return self.pool.take()

    def _give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.pool.give_back(page)

    def _keys(self, tokens: Sequence[int], first: int, last: int) -> Iterator[tuple[int, ...]]:
        size = self.page_size
        for index in range(first, last):
            yield tuple(tokens[index * size : (index + 1) * size])
