"""What must hold of an engine's memory between any two steps."""

from __future__ import annotations

from collections import Counter

from slipstream.cache.prefix_tree import Node
from slipstream.engine.core import Engine
from slipstream.engine.sequence import State


def check_integrity(engine: Engine) -> None:
    """Every page has one owner, references are counted right, and page tables point at what their sequence holds."""
    cache = engine.cache
    owners: Counter[int] = Counter()
    references: Counter[int] = Counter()
    nodes: dict[int, Node] = {}
    for sequence in engine.scheduler.waiting:
        assert sequence.state is State.WAITING
        assert sequence.pages.num_pages == 0, "a waiting sequence holds pages"
        assert sequence.computed == 0
    for sequence in engine.scheduler.running:
        assert sequence.state is State.RUNNING
        pages = sequence.pages
        assert sequence.computed <= pages.num_pages * cache.page_size
        assert sequence.remaining > 0 or sequence.request.max_tokens == 0
        for index in range(pages.start, pages.num_pages):
            if index < len(pages.nodes):
                node = pages.nodes[index]
                assert pages.table[index] == node.page, "a page table points at a page that is not its node's"
                references[id(node)] += 1
                nodes[id(node)] = node
            else:
                owners[int(pages.table[index])] += 1
        assert not pages.table[: pages.start].any()
    in_tree = _tree_nodes(engine)
    for node in in_tree:
        nodes[id(node)] = node
    for node in nodes.values():
        assert node.refs == references[id(node)], "a prefix node has a wrong reference count"
        owners[node.page] += 1
    for page in cache.pool._free:
        owners[page] += 1
    assert owners == Counter(range(1, cache.pool.num_pages)), "a page has no owner or two"
    assert cache.tree.num_nodes == len(in_tree)
    assert cache.tree.num_unreferenced == sum(node.refs == 0 for node in in_tree)


def _tree_nodes(engine: Engine) -> list[Node]:
    found: list[Node] = []
    stack = [child for root in engine.cache.tree._roots.values() for child in root.children.values()]
    while stack:
        node = stack.pop()
        found.append(node)
        stack.extend(node.children.values())
    return found
