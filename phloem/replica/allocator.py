"""A mirror of one owner's page allocator: ints only, equal on every rank.

0            fresh          capacity
|-- handed out --|-- never used --|
  at least once
  used[slot] == 1: in use, else its slot is on the stack `free`
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np

from phloem.core.refs import make_ref, owner_of, owners_of

__all__ = ["PageAllocator", "give_back"]

FEW_PAGES = 24  # are sorted one by one: numpy's calls cost as much as these


class PageAllocator:
    """Hands out the slots of one owner's pool as packed refs; costs memory only for slots used."""

    __slots__ = ("_base", "_free", "_fresh", "_used", "capacity", "num_free", "owner")

    def __init__(self, owner: int, capacity: int) -> None:
        self.owner = owner
        self.capacity = capacity
        self.num_free = capacity
        self._base = make_ref(owner, 0)
        self._fresh = 0
        self._free = array("q")
        self._used = bytearray()

    def alloc(self, num_pages: int) -> bytes:
        """Take pages: those freed last first, then never used ones. Returns packed int64 refs."""
        assert 0 <= num_pages <= self.num_free, (
            f"owner {self.owner}: {num_pages} pages asked, {self.num_free} free"
        )
        free, used = self._free, self._used
        cut = len(free) - min(num_pages, len(free))
        slots = free[cut:]
        del free[cut:]
        for slot in slots:
            used[slot] = 1
        missing = num_pages - len(slots)
        if missing:
            slots.extend(range(self._fresh, self._fresh + missing))
            used.extend(b"\1" * missing)
            self._fresh += missing
        self.num_free -= num_pages
        if self._base:
            base = self._base
            slots = array("q", [base + slot for slot in slots])
        return slots.tobytes()

    def free(self, refs: bytes) -> None:
        """Give pages back. Freeing a page that is not in use is a bug, and asserts."""
        slots = array("q", refs)
        if self._base:
            base = self._base
            slots = array("q", [ref - base for ref in slots])
        used, fresh = self._used, self._fresh
        for slot in slots:
            known = 0 <= slot < fresh and used[slot]
            assert known, f"owner {self.owner}: slot {slot} freed while it is not in use"
            used[slot] = 0
        self._free.extend(slots)
        self.num_free += len(slots)

    def is_used(self, slot: int) -> bool:
        """Whether the slot is handed out now."""
        return 0 <= slot < self._fresh and bool(self._used[slot])

    def free_slots(self) -> list[int]:
        """Slots that were used and are free again, the next to be handed out last."""
        return self._free.tolist()

    @property
    def num_touched(self) -> int:
        """Slots handed out at least once: all of them lie below this one."""
        return self._fresh

    def digest(self) -> bytes:
        """A fingerprint of everything that decides what comes next."""
        head = f"{self.owner},{self.capacity},{self._fresh};".encode()
        return hashlib.blake2b(head + self._free.tobytes() + self._used, digest_size=16).digest()


def give_back(allocators: Sequence[PageAllocator], refs: bytes) -> None:
    """Free pages of several owners, each one's in the order in which they are named."""
    if len(allocators) == 1:
        allocators[0].free(refs)
        return
    if len(refs) // 8 <= FEW_PAGES:
        by_owner = [array("q") for _ in allocators]
        for ref in array("q", refs):
            by_owner[owner_of(ref)].append(ref)
        shares = [own.tobytes() for own in by_owner]
    else:
        pages = np.frombuffer(refs, np.int64)
        owners = owners_of(pages)
        shares = [pages[owners == owner].tobytes() for owner in range(len(allocators))]
    for allocator, share in zip(allocators, shares, strict=True):
        if share:
            allocator.free(share)
