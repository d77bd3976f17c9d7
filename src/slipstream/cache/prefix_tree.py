"""Pages of past prompts and answers, found again by their tokens.

A node is one full page: the tokens in it, below the node of the page before. What else changes keys and values (salt,
adapter) makes a root of its own. A node in use has references; one without may be evicted, least recently used first.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from itertools import count


class Node:
    """One cached page. `refs` counts the sequences that read it."""

    __slots__ = ("attached", "children", "key", "last_used", "page", "parent", "refs")

    def __init__(self, key: Hashable, page: int, parent: Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[Hashable, Node] = {}
        self.refs = 0
        self.last_used = 0
        self.attached = True


class PrefixTree:
    """Nodes by namespace and tokens. The tree never frees pages itself: what it drops is returned to the caller."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node] = {}
        self._clock = count(1)
        self._heap: list[tuple[int, int, Node]] = []
        self._tie = count()
        self.num_nodes = 0
        self.num_unreferenced = 0

    def match(self, namespace: Hashable, keys: Iterable[Hashable]) -> list[Node]:
        """The longest path of nodes whose page keys begin `keys`. References are not taken."""
        node = self._roots.get(namespace)
        path: list[Node] = []
        if node is None:
            return path
        for key in keys:
            node = node.children.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def acquire(self, nodes: Sequence[Node]) -> None:
        """Take one reference on each node."""
        for node in nodes:
            if node.refs == 0:
                self.num_unreferenced -= 1
            node.refs += 1

    def release(self, nodes: Sequence[Node]) -> list[int]:
        """Give back one reference on each node of a path (root first). -> pages that nobody can find any more."""
        freed = []
        now = next(self._clock)
        for node in reversed(nodes):
            if node.refs <= 0:
                raise RuntimeError("a prefix node was released more often than acquired")
            node.refs -= 1
            node.last_used = now
            if node.refs == 0:
                if node.attached:
                    self.num_unreferenced += 1
                    self._offer(node)
                else:
                    freed.append(node.page)
        return freed

    def extend(self, namespace: Hashable, parent: Node | None, key: Hashable, page: int) -> Node | None:
        """Add `page` below `parent` (None: the root) holding one reference.

        -> the new node; or a node that stands there already, referenced, whose page the caller must use instead of its
        own; or None when `parent` was dropped from the tree, so that nothing can be added below it.
        """
        if parent is None:
            parent = self._roots.get(namespace)
            if parent is None:
                parent = self._roots[namespace] = Node(namespace, 0, None)
        elif not parent.attached:
            return None
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(key, page, parent)
            self.num_nodes += 1
            self.num_unreferenced += 1
        self.acquire((node,))
        return node

    def evict(self) -> int | None:
        """Drop the least recently used page that nobody reads. -> its page, or None when there is none."""
        while self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            if last_used == node.last_used and self._evictable(node):
                return self._drop_leaf(node)
        return None

    def detach_inner(self) -> list[int]:
        """Drop an unreferenced node that has children in use, and all below it (sequences with a window leave such).

        -> pages freed by it; pages still read are freed when their reader releases them.
        """
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None and node.refs == 0:
                return self._detach(node)
            stack.extend(node.children.values())
        return []

    def clear(self) -> list[int]:
        """Drop everything that nobody reads. -> its pages."""
        freed = []
        while (page := self.evict()) is not None:
            freed.append(page)
        return freed

    @staticmethod
    def _evictable(node: Node) -> bool:
        return node.attached and node.refs == 0 and not node.children

    def _offer(self, node: Node) -> None:
        if node.children:
            return
        heapq.heappush(self._heap, (node.last_used, next(self._tie), node))
        if len(self._heap) > 2 * self.num_nodes + 64:
            # Each use leaves an outdated entry behind; without this the heap grows with the number of requests served.
            current = {id(n): (used, tie, n) for used, tie, n in self._heap if used == n.last_used}
            self._heap = [entry for entry in current.values() if self._evictable(entry[2])]
            heapq.heapify(self._heap)

    def _drop_leaf(self, node: Node) -> int:
        node.attached = False
        self.num_nodes -= 1
        self.num_unreferenced -= 1
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if parent.parent is None:
            if not parent.children:
                del self._roots[parent.key]
        elif parent.refs == 0:
            self._offer(parent)
        return node.page

    def _detach(self, top: Node) -> list[int]:
        assert top.parent is not None
        del top.parent.children[top.key]
        if top.parent.parent is None and not top.parent.children:
            del self._roots[top.parent.key]
        freed = []
        stack = [top]
        while stack:
            node = stack.pop()
            node.attached = False
            self.num_nodes -= 1
            if node.refs == 0:
                self.num_unreferenced -= 1
                freed.append(node.page)
            stack.extend(node.children.values())
        return freed
