"""Commands that change window state (see `replica.commands`): pages are named by their refs alone.

    window   window_alloc -> refs   free -> held by a request
             window_free            held by a request -> free
             window_attach          held by a request -> in the tree; born with its writer's lock
             window_lock            one more lock on pages in the tree
             window_unlock -> refs  one lock less; returns those that nobody locks now
             window_evict           in the tree, unlocked -> free; a tombstone stays
    host     window_host_alloc -> slots, _free, _hold, _release    as for full state
             window_host_attach     held by a transfer -> the tree
             window_host_evict      on the host -> free

What leaves the tree in the full component takes its window state along, without a command.
"""

from __future__ import annotations

from phloem.replica.commands import NUM_OPS as _FIRST
from phloem.replica.commands import Command

__all__ = [
    "NUM_OPS",
    "WINDOW_ALLOC",
    "WINDOW_ATTACH",
    "WINDOW_EVICT",
    "WINDOW_FREE",
    "WINDOW_HOST_ALLOC",
    "WINDOW_HOST_ATTACH",
    "WINDOW_HOST_EVICT",
    "WINDOW_HOST_FREE",
    "WINDOW_HOST_HOLD",
    "WINDOW_HOST_RELEASE",
    "WINDOW_LOCK",
    "WINDOW_UNLOCK",
    "window_alloc",
    "window_attach",
    "window_evict",
    "window_free",
    "window_host_alloc",
    "window_host_attach",
    "window_host_evict",
    "window_host_free",
    "window_host_hold",
    "window_host_release",
    "window_lock",
    "window_unlock",
]

(
    WINDOW_ALLOC,
    WINDOW_FREE,
    WINDOW_ATTACH,
    WINDOW_LOCK,
    WINDOW_UNLOCK,
    WINDOW_EVICT,
    WINDOW_HOST_ALLOC,
    WINDOW_HOST_FREE,
    WINDOW_HOST_HOLD,
    WINDOW_HOST_RELEASE,
    WINDOW_HOST_ATTACH,
    WINDOW_HOST_EVICT,
) = range(_FIRST, _FIRST + 12)
NUM_OPS = _FIRST + 12


def window_alloc(owner: int, num_pages: int) -> Command:
    """Take `num_pages` pages from an owner's window pool."""
    return (WINDOW_ALLOC, owner, num_pages)


def window_free(refs: bytes) -> Command:
    """Give pages that a request holds back to their pools."""
    return (WINDOW_FREE, refs)


def window_attach(node: int, first_page: int, refs: bytes) -> Command:
    """The node's tombstones from its page `first_page` on become these pages, locked once."""
    return (WINDOW_ATTACH, node, first_page, refs)


def window_lock(refs: bytes) -> Command:
    """Add one lock to each of these pages of the tree."""
    return (WINDOW_LOCK, refs)


def window_unlock(refs: bytes) -> Command:
    """Take one lock from each of these pages."""
    return (WINDOW_UNLOCK, refs)


def window_evict(refs: bytes) -> Command:
    """Free unlocked pages of the tree."""
    return (WINDOW_EVICT, refs)


def window_host_alloc(num_pages: int) -> Command:
    """Take `num_pages` slots of the host arena for windows."""
    return (WINDOW_HOST_ALLOC, num_pages)


def window_host_free(slots: bytes) -> Command:
    """Give slots that a transfer holds back to the arena."""
    return (WINDOW_HOST_FREE, slots)


def window_host_hold(slots: bytes) -> Command:
    """Keep slots from being used again while somebody may still read or write them."""
    return (WINDOW_HOST_HOLD, slots)


def window_host_release(slots: bytes) -> Command:
    """Undo one `window_host_hold`."""
    return (WINDOW_HOST_RELEASE, slots)


def window_host_attach(node: int, first_page: int, slots: bytes) -> Command:
    """The window state of the node's pages from `first_page` on lies on the host as well."""
    return (WINDOW_HOST_ATTACH, node, first_page, slots)


def window_host_evict(slots: bytes) -> Command:
    """Drop host copies of window state."""
    return (WINDOW_HOST_EVICT, slots)
