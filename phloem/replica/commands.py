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
    host     host_alloc -> slots  free -> held by a transfer
             host_free            held by a transfer -> free
             host_hold, _release  held slots that are freed stay out of use until they are released
             host_attach          held by a transfer -> a second residence of pages on the device
             host_insert -> node  held by a transfer -> in the tree, on the host alone
             demote               on device and host -> on the host alone
             adopt                on the host alone -> also on the device, in a request's own pages
             host_evict           on the host -> free; what is nowhere else leaves the tree
             stored, not_stored   the pages are known to be in storage; they are not any more
    replicas replicate -> refs    free -> a replica of a page of another owner, being made
             replicated           it is whole, and may be read
             drop_replicas        a replica -> free; so without a command where its page is freed

Plain tuples, because two are written for every request on the hot path, and they cost a tenth of
a class to make and to digest; only the functions below make them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = [
    "ADOPT",
    "ALLOC",
    "APPEND",
    "DEMOTE",
    "DETACH",
    "DROP_REPLICAS",
    "EVICT",
    "FREE",
    "HOST_ALLOC",
    "HOST_ATTACH",
    "HOST_EVICT",
    "HOST_FREE",
    "HOST_HOLD",
    "HOST_INSERT",
    "HOST_RELEASE",
    "INSERT",
    "LOCK",
    "MERGE",
    "NOT_STORED",
    "NUM_OPS",
    "REPLICATE",
    "REPLICATED",
    "SPLIT",
    "STORED",
    "UNLOCK",
    "Command",
    "adopt",
    "alloc",
    "append",
    "demote",
    "detach",
    "drop_replicas",
    "evict",
    "free",
    "host_alloc",
    "host_attach",
    "host_evict",
    "host_free",
    "host_hold",
    "host_insert",
    "host_release",
    "insert",
    "lock",
    "merge",
    "not_stored",
    "replicate",
    "replicated",
    "split",
    "stored",
    "unlock",
]

Command: TypeAlias = tuple[Any, ...]

ALLOC, FREE, INSERT, APPEND, SPLIT, MERGE, LOCK, UNLOCK, EVICT, DETACH = range(10)
HOST_ALLOC, HOST_FREE, HOST_HOLD, HOST_RELEASE, HOST_ATTACH, HOST_INSERT = range(10, 16)
DEMOTE, ADOPT, HOST_EVICT, STORED, NOT_STORED = range(16, 21)
REPLICATE, REPLICATED, DROP_REPLICAS = range(21, 24)
NUM_OPS = 24


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


def host_alloc(num_pages: int) -> Command:
    """Take `num_pages` slots of the host arena."""
    return (HOST_ALLOC, num_pages)


def host_free(slots: bytes) -> Command:
    """Give slots that a transfer holds back to the arena."""
    return (HOST_FREE, slots)


def host_hold(slots: bytes) -> Command:
    """Keep slots from being used again while somebody may still read or write them."""
    return (HOST_HOLD, slots)


def host_release(slots: bytes) -> Command:
    """Undo one `host_hold`."""
    return (HOST_RELEASE, slots)


def host_attach(node: int, slots: bytes) -> Command:
    """The nodes that end with `node` and have as many pages now lie on the host as well."""
    return (HOST_ATTACH, node, slots)


def host_insert(parent: int, namespace: bytes, tokens: bytes, slots: bytes) -> Command:
    """Add a leaf below `parent` whose pages lie on the host alone."""
    return (HOST_INSERT, parent, namespace, tokens, slots)


def demote(nodes: tuple[int, ...]) -> Command:
    """Free the device pages of unlocked nodes that lie on the host as well, in this order."""
    return (DEMOTE, nodes)


def adopt(node: int, refs: bytes) -> Command:
    """A request's own pages become those of a node that was on the host alone; it locks it."""
    return (ADOPT, node, refs)


def host_evict(victims: tuple[int, ...]) -> Command:
    """Drop host copies, in this order: (node, pages, node, pages, ...), tails first.

    A node on the device loses all of them and stays; any other must be a leaf, and is shortened.
    """
    return (HOST_EVICT, victims)


def stored(node: int, num_pages: int) -> Command:
    """The `num_pages` pages that end with `node` are in storage; (0, 0): nothing is any more."""
    return (STORED, node, num_pages)


def not_stored(node: int) -> Command:
    """Storage has lost pages of the node."""
    return (NOT_STORED, node)


def replicate(owner: int, refs: bytes) -> Command:
    """Take pages from an owner's pool for replicas of these pages of others, in their order."""
    return (REPLICATE, owner, refs)


def replicated(replicas: bytes) -> Command:
    """These replicas hold what their pages hold."""
    return (REPLICATED, replicas)


def drop_replicas(replicas: bytes) -> Command:
    """Free replicas; their pages stay."""
    return (DROP_REPLICAS, replicas)
