"""The commands: small values of ints and bytes, complete in themselves.

Whatever needs a clock, a float, a policy or the order of a set was decided before a command is
written; applying one is a pure function of the state. Nodes are named by ids that the state hands
out in the order of the log, so they are equal on every rank; refs are packed native int64.

    pages    Alloc   -> refs      free -> held by a request
             Free                 held by a request -> free
    tree     Insert  -> node      held by a request -> in the tree; born with its writer's lock
             Append               the same, at the end of a leaf that only the writer locks
             Split   -> upper     one node becomes two; the lower one keeps the id
             Merge                a run of single children becomes one; the lowest keeps the id
             Evict                in the tree, unlocked -> free (whole leaves, or tails of leaves)
             Detach               what is left of the tree is never found again, freed when unlocked
    locks    Lock, Unlock         a path of nodes, from one upwards
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

__all__ = [
    "Alloc",
    "Append",
    "Command",
    "Detach",
    "Evict",
    "Free",
    "Insert",
    "Lock",
    "Merge",
    "Split",
    "Unlock",
]


class Alloc(NamedTuple):
    """Take `num_pages` pages from an owner's pool."""

    owner: int
    num_pages: int


class Free(NamedTuple):
    """Give pages that a request holds back to their pools."""

    refs: bytes


class Insert(NamedTuple):
    """Add a leaf below `parent`; it is born with one lock, its writer's, which moves down to it."""

    parent: int
    namespace: bytes
    tokens: bytes
    refs: bytes


class Append(NamedTuple):
    """Lengthen a leaf that only the writer locks."""

    node: int
    tokens: bytes
    refs: bytes


class Split(NamedTuple):
    """Cut a node after its first `num_pages` pages."""

    node: int
    num_pages: int


class Merge(NamedTuple):
    """Join a node with the `num_ancestors` nodes above it, each of which has no other child."""

    node: int
    num_ancestors: int


class Lock(NamedTuple):
    """Add one lock to every node from `node` upwards, up to but not including `above`."""

    node: int
    above: int


class Unlock(NamedTuple):
    """Take one lock from every node from `node` up to the root."""

    node: int


class Evict(NamedTuple):
    """Drop tails of unlocked leaves, in this order: (node, pages, node, pages, ...)."""

    victims: tuple[int, ...]


class Detach(NamedTuple):
    """Cut off whatever the tree holds; all of it must be locked."""


Command: TypeAlias = Alloc | Free | Insert | Append | Split | Merge | Lock | Unlock | Evict | Detach
