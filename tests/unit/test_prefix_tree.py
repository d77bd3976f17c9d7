"""The prefix tree by itself: order of dropping, memory of its own, detached parts."""

from __future__ import annotations

from slipstream.cache.prefix_tree import Node, PrefixTree


def path(tree: PrefixTree, keys: str, pages: dict[str, int]) -> list[Node]:
    """Add a path of one-letter keys, referenced once; pages are numbered as they come."""
    nodes: list[Node] = []
    for length in range(1, len(keys) + 1):
        page = pages.setdefault(keys[:length], len(pages) + 1)
        node = tree.extend(None, nodes[-1] if nodes else None, keys[length - 1], page)
        assert node is not None
        nodes.append(node)
    return nodes


def test_least_recently_used_leaves_go_first() -> None:
    tree, pages = PrefixTree(), {}
    for keys in ("ab", "cd", "ef"):
        tree.release(path(tree, keys, pages))
    tree.release(path(tree, "ab", pages))
    order = [tree.evict() for _ in range(6)]
    assert order == [pages["cd"], pages["c"], pages["ef"], pages["e"], pages["ab"], pages["a"]]
    assert tree.evict() is None
    assert tree.num_nodes == tree.num_unreferenced == 0


def test_its_own_memory_does_not_grow_with_use() -> None:
    tree, pages = PrefixTree(), {}
    for _ in range(2000):
        tree.release(path(tree, "abc", pages))
    assert len(tree._heap) <= 2 * tree.num_nodes + 65
    assert [tree.evict() for _ in range(3)] == [pages["abc"], pages["ab"], pages["a"]]


def test_a_detached_part_is_freed_by_its_last_reader() -> None:
    tree, pages = PrefixTree(), {}
    nodes = path(tree, "abc", pages)
    assert tree.detach_inner() == []
    assert tree.release(nodes[:2]) == []
    freed = tree.detach_inner()
    assert sorted(freed) == [pages["a"], pages["ab"]]
    assert tree.num_nodes == tree.num_unreferenced == 0
    assert tree.match(None, "abc") == []
    assert tree.extend(None, nodes[2], "d", 9) is None
    assert tree.release(nodes[2:]) == [pages["abc"]]
