"""Copies of pages beside their owners: a side table, equal on every rank.

          replicate                 replicated                 drop_replicas
    free -----------> being made ---------------> may be read ---------------> free
                            `---- its page leaves the device, or its slot is needed ----'

A replica belongs to the page that it copies: it ends with it, without a command. It is never
written to again, never the only copy, and counts as free, since it gives way to anything.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator

from phloem.core.refs import owner_of

__all__ = ["PageReplicas"]

Pairs = list[tuple[int, int]]


class PageReplicas:
    """Replicas by page and by the rank that holds them; all are packed refs.

    Changed by `CacheState.apply` alone. `on_gone` is told (page, replica) of those that end; the
    leader's alone.
    """

    __slots__ = ("_by_owner", "_of", "_ready", "num_pages", "on_gone")

    def __init__(self, num_owners: int) -> None:
        self._of: dict[int, dict[int, int]] = {}  # page -> owner -> replica
        self._by_owner: list[dict[int, int]] = [{} for _ in range(num_owners)]  # replica -> page
        self._ready: set[int] = set()
        self.num_pages = 0
        self.on_gone: Callable[[Pairs], None] | None = None

    def count(self, owner: int) -> int:
        """How many replicas the owner's pool holds."""
        return len(self._by_owner[owner])

    def held_by(self, owner: int) -> dict[int, int]:
        """Replica -> page of one owner, in the order in which they were made; not to be changed."""
        return self._by_owner[owner]

    def replica(self, page: int, owner: int) -> int | None:
        """The owner's replica of a page, ready or not."""
        return self._of.get(page, {}).get(owner)

    def is_ready(self, replica: int) -> bool:
        """Whether it may be read."""
        return replica in self._ready

    def pairs(self) -> Iterator[tuple[int, int]]:
        """(page, replica) of all."""
        for held in self._by_owner:
            for replica, page in held.items():
                yield page, replica

    def add(self, pages: bytes, replicas: bytes) -> None:
        """Slots have been taken for replicas of these pages."""
        for page, replica in zip(array("q", pages), array("q", replicas), strict=True):
            owner = owner_of(replica)
            assert owner != owner_of(page), f"page {page} would have a replica on its own rank"
            of = self._of.setdefault(page, {})
            assert owner not in of, f"rank {owner} has a replica of page {page} already"
            of[owner] = replica
            self._by_owner[owner][replica] = page
            self.num_pages += 1

    def commit(self, replicas: bytes) -> None:
        """These are whole, and may be read from now on."""
        for replica in array("q", replicas):
            known = replica in self._by_owner[owner_of(replica)]
            assert known, f"{replica} is no replica, and cannot become one that is read"
            assert replica not in self._ready, f"replica {replica} is made twice"
            self._ready.add(replica)

    def drop(self, replicas: bytes) -> None:
        """These end; the caller frees their slots."""
        gone = [(self._by_owner[owner_of(r)][r], r) for r in array("q", replicas)]
        for page, replica in gone:
            of = self._of[page]
            del of[owner_of(replica)]
            if not of:
                del self._of[page]
        self._forget(gone)

    def leave(self, pages: bytes) -> bytes:
        """The pages leave the device, and their replicas with them. Returns the replicas' refs."""
        if not self._of:
            return b""
        gone: Pairs = []
        for page in array("q", pages):
            of = self._of.pop(page, None)
            if of is not None:
                gone += [(page, replica) for replica in of.values()]
        self._forget(gone)
        return _packed(replica for _, replica in gone)

    def digest(self) -> bytes:
        """A fingerprint of every replica."""
        rows = sorted((replica, page, replica in self._ready) for page, replica in self.pairs())
        return hashlib.blake2b(repr(rows).encode(), digest_size=16).digest()

    def _forget(self, gone: Pairs) -> None:
        for _, replica in gone:
            del self._by_owner[owner_of(replica)][replica]
            self._ready.discard(replica)
        self.num_pages -= len(gone)
        if gone and self.on_gone is not None:
            self.on_gone(gone)


def _packed(refs: Iterable[int]) -> bytes:
    return array("q", refs).tobytes()
