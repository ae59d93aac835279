"""Changes of residence: what `RadixTree` has to do with the host tier.

Called by `CacheState.apply` alone, like the tree's own methods.
"""

from __future__ import annotations

from collections.abc import Iterator

from phloem.cache.chain import KEY_BYTES
from phloem.cache.node import REF_BYTES, Node
from phloem.cache.tree import RadixTree

__all__ = [
    "adopt",
    "attach_host",
    "covered",
    "demote",
    "drop_host",
    "forget_stored",
    "insert_host",
    "mark_stored",
    "unmark_stored",
]


def covered(tree: RadixTree, node: Node, num_pages: int) -> Iterator[Node]:
    """The nodes from `node` upwards that have `num_pages` pages together, the lowest first."""
    step = node
    while num_pages > 0:
        assert step is not tree.root, f"there are not so many pages above {node}"
        yield step
        num_pages -= step.num_pages
        assert step.parent is not None, f"{step} is not in the tree"
        step = step.parent
    assert num_pages == 0, f"a part of a node above {node} was named"


def attach_host(tree: RadixTree, node: Node, slots: bytes) -> None:
    """Give the nodes that end with `node` host copies; `slots` are in order, root first."""
    end = len(slots)
    for step in list(covered(tree, node, end // REF_BYTES)):
        assert step.refs, f"{step} is not on the device"
        assert not step.host, f"{step} is on the host"
        start = end - len(step.refs)
        step.host = slots[start:end]
        end = start
    tree.host_pages += len(slots) // REF_BYTES


def insert_host(
    tree: RadixTree, parent: Node, namespace: bytes, tokens: bytes, slots: bytes, now: int
) -> Node:
    """Add a leaf that is on the host alone."""
    node = Node(tree.next_id, parent, namespace, tokens, b"")
    node.host = slots
    tree.add_leaf(node, now)
    tree.host_pages += node.num_pages
    tree.version += 1
    tree.epoch += 1
    return node


def demote(tree: RadixTree, node: Node) -> bytes:
    """Take a node off the device; returns the refs that it had."""
    assert not node.locks, f"{node} is locked"
    assert node.host, f"{node} is on the device alone"
    assert not any(child.refs for child in node.children.values()), f"{node} is not the last"
    refs = node.refs
    node.refs = b""
    tree.total_pages -= len(refs) // REF_BYTES
    tree.version += 1
    tree.epoch += 1
    return refs


def adopt(tree: RadixTree, node: Node, refs: bytes) -> None:
    """Give a node that is on the host alone device pages, and its writer's lock."""
    assert not node.refs, f"{node} is on the device"
    assert len(refs) == len(node.host), f"{node} wants other pages"
    node.refs = refs
    node.locks = 1
    node.hits += 1
    tree.total_pages += node.num_pages
    tree.locked_pages += node.num_pages
    tree.version += 1
    tree.epoch += 1


def drop_host(tree: RadixTree, node: Node, num_pages: int) -> tuple[bytes, bytes]:
    """Drop host copies; returns the slots, and the content keys of what is now on neither tier."""
    tree.host_pages -= num_pages
    if node.refs:
        assert num_pages == node.num_pages, f"{node} would lie on the host in part"
        slots, node.host = node.host, b""
        return slots, b""
    assert not node.children, f"{node} has children"
    assert 0 < num_pages <= node.num_pages, f"{node} has not {num_pages} pages"
    left = node.num_pages - num_pages
    slots, chain = node.host[left * REF_BYTES :], node.chain[left * KEY_BYTES :]
    if left:
        node.key = node.key[: left * tree.page_bytes]
        node.host = node.host[: left * REF_BYTES]
        node.chain = node.chain[: left * KEY_BYTES]
        for state in node.extra:
            state.cut(left * REF_BYTES)
    else:
        tree.drop(node)
    tree.version += 1
    tree.epoch += 1
    return slots, chain


def mark_stored(tree: RadixTree, node: Node, num_pages: int) -> None:
    """The nodes that end with `node` are in storage."""
    for step in list(covered(tree, node, num_pages)):
        step.stored = True


def forget_stored(tree: RadixTree) -> None:
    """There is another storage now, or none."""
    for node in tree.nodes.values():
        node.stored = False


def unmark_stored(node: Node) -> None:
    """Storage has lost pages of it."""
    assert node.stored, f"{node} was not known to be in storage"
    node.stored = False
