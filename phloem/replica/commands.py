"""The commands: tuples (op, field, ...) of ints and bytes, complete in themselves.

Whatever needs a clock, a float, a policy or the order of a set was decided before a command is
written; applying one is a pure function of the state. Nodes are named by ids that the state hands
out in the order of the log, so they are equal on every rank; refs are packed native int64.

    pages    alloc   -> refs      free -> held by a request
             free                 held by a request -> free
    tree     insert  -> node      held by a request -> in the tree; born with its writer's lock
             append               the same, at the end of a leaf that only the writer locks
             split   -> upper     one node becomes two; the lower one keeps the id
             merge                a run of single children becomes one; the lowest keeps the id
             evict                in the tree, unlocked -> free (whole leaves, or tails of leaves)
             detach               what is left of the tree is never found again, freed when unlocked
    locks    lock, unlock         a path of nodes, from one upwards

Plain tuples, because two are written for every request on the hot path, and they cost a tenth of
a class to make and to digest; only the functions below make them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = [
    "ALLOC",
    "APPEND",
    "DETACH",
    "EVICT",
    "FREE",
    "INSERT",
    "LOCK",
    "MERGE",
    "NUM_OPS",
    "SPLIT",
    "UNLOCK",
    "Command",
    "alloc",
    "append",
    "detach",
    "evict",
    "free",
    "insert",
    "lock",
    "merge",
    "split",
    "unlock",
]

Command: TypeAlias = tuple[Any, ...]

ALLOC, FREE, INSERT, APPEND, SPLIT, MERGE, LOCK, UNLOCK, EVICT, DETACH = range(10)
NUM_OPS = 10


def alloc(owner: int, num_pages: int) -> Command:
    """Take `num_pages` pages from an owner's pool."""
    return (ALLOC, owner, num_pages)


def free(refs: bytes) -> Command:
    """Give pages that a request holds back to their pools."""
    return (FREE, refs)


def insert(parent: int, namespace: bytes, tokens: bytes, refs: bytes) -> Command:
    """Add a leaf below `parent`; it is born with one lock, its writer's, which moves down to it."""
    return (INSERT, parent, namespace, tokens, refs)


def append(node: int, tokens: bytes, refs: bytes) -> Command:
    """Lengthen a leaf that only the writer locks."""
    return (APPEND, node, tokens, refs)


def split(node: int, num_pages: int) -> Command:
    """Cut a node after its first `num_pages` pages."""
    return (SPLIT, node, num_pages)


def merge(node: int, num_ancestors: int) -> Command:
    """Join a node with the `num_ancestors` nodes above it, each of which has no other child."""
    return (MERGE, node, num_ancestors)


def lock(node: int, above: int) -> Command:
    """Add one lock to every node from `node` upwards, up to but not including `above`."""
    return (LOCK, node, above)


def unlock(node: int) -> Command:
    """Take one lock from every node from `node` up to the root."""
    return (UNLOCK, node)


def evict(victims: tuple[int, ...]) -> Command:
    """Drop tails of unlocked leaves, in this order: (node, pages, node, pages, ...)."""
    return (EVICT, victims)


def detach() -> Command:
    """Cut off whatever the tree holds; all of it must be locked."""
    return (DETACH,)
