"""A mirror of the host arena's allocator, with holds.

          alloc                  attach, insert              evict
    free --------> a transfer's ----------------> the tree ---------> free
                                                     `-- if held --> limbo -- release --> free

A hold is a promise that a slot is not used again while a transfer may still read or write it. It
does not keep the page in the tree: a held slot that is freed waits in limbo.
"""

from __future__ import annotations

import hashlib
from array import array

from phloem.replica.allocator import PageAllocator

__all__ = ["HostPool"]


class HostPool:
    """Slots of the host arena, packed int64."""

    __slots__ = ("_allocator", "_holds", "_limbo")

    def __init__(self, capacity: int) -> None:
        self._allocator = PageAllocator(0, capacity)
        self._holds: dict[int, int] = {}
        self._limbo: set[int] = set()

    @property
    def capacity(self) -> int:
        return self._allocator.capacity

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_limbo(self) -> int:
        """Freed slots that are still held."""
        return len(self._limbo)

    @property
    def num_held(self) -> int:
        return len(self._holds)

    def alloc(self, num_pages: int) -> bytes:
        return self._allocator.alloc(num_pages)

    def free(self, slots: bytes) -> None:
        """Give slots back; those that are held only when they are released."""
        if not self._holds:
            self._allocator.free(slots)
            return
        now = array("q")
        for slot in array("q", slots):
            if slot in self._holds:
                assert slot not in self._limbo, f"host slot {slot} freed twice"
                self._limbo.add(slot)
            else:
                now.append(slot)
        self._allocator.free(now.tobytes())

    def hold(self, slots: bytes) -> None:
        for slot in array("q", slots):
            assert self._allocator.is_used(slot), f"host slot {slot} is held while it is free"
            self._holds[slot] = self._holds.get(slot, 0) + 1

    def release(self, slots: bytes) -> None:
        for slot in array("q", slots):
            count = self._holds.get(slot, 0)
            assert count > 0, f"host slot {slot} is released while nobody holds it"
            if count > 1:
                self._holds[slot] = count - 1
                continue
            del self._holds[slot]
            if slot in self._limbo:
                self._limbo.remove(slot)
                self._allocator.free(array("q", [slot]).tobytes())

    def is_used(self, slot: int) -> bool:
        """Whether the slot is not free: limbo counts as used."""
        return self._allocator.is_used(slot)

    def in_limbo(self, slot: int) -> bool:
        return slot in self._limbo

    def digest(self) -> bytes:
        """A fingerprint of everything that decides what comes next."""
        holds = repr((sorted(self._holds.items()), sorted(self._limbo))).encode()
        return hashlib.blake2b(self._allocator.digest() + holds, digest_size=16).digest()
