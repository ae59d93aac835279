"""Which rank owns the next pages of a chain: decided by the leader.

The pools of all ranks are one room: where a page lies is a wish, that it lies somewhere is not.
Whether pages can be had at all is a question about sums (`Leader.allocate`), and a page whose rank
is full goes to the one with most room.

    name         pages of a chain on 3 ranks
    striped      0 1 2 0 1 2 0 1 2
    contiguous   0 0 0 0 0 0 1 1 1              as many on one rank as go there
    replicate    every rank has every page      see `Replicate`

A run begins on the rank with most room, so that many short ones are spread evenly even if all of
them continue the same prefix; from then on it follows its own last page.

There is no quarantine of freed pages. A rank begins step s + 1 when all have finished step s, so a
page freed in the plan of a step is read by nobody when a later step writes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from phloem.core.errors import ConfigError

__all__ = [
    "PLACEMENTS",
    "Contiguous",
    "Owners",
    "PlacementPolicy",
    "Replicate",
    "Striped",
    "make_placement",
    "num_displaced",
    "settle",
    "take_shares",
]

Owners: TypeAlias = npt.NDArray[np.int64]  # (num_pages,): the owner of each page, in page order


class PlacementPolicy(Protocol):
    """Says where pages ought to lie. `free`: how many free pages each owner has."""

    def pools(self, num_pages: tuple[int, ...]) -> tuple[int, ...]:
        """The pools that pages are allocated from, given each rank's."""
        ...

    def wish(self, num_pages: int, free: Sequence[int], last: int | None) -> Owners:
        """Owners of a run of pages, right after one that `last` owns, or of a new run (None)."""
        ...

    def price(self, num_pages: int) -> int:
        """How many cached pages may be given up for such a wish, beyond those that must go."""
        ...


class Striped:
    """Page after page from rank to rank: causal work is even to a page.

    The price. On recorded traces (4 ranks, all pools full, the six smaller pool sizes) hits are
    those of one rank and the busiest rank gets 1.9 to 8.3 % more pages than its share if nothing
    is given up; with as many pages as the run has, at most, hits are 0.993 to 1.0 of one rank's
    and the share is exceeded by 0.9 % at most. Since what is lost is computed again, in time that
    is 2 to 8 % against 0 to 1.3 %.
    """

    __slots__ = ()

    def pools(self, num_pages: tuple[int, ...]) -> tuple[int, ...]:
        return num_pages

    def wish(self, num_pages: int, free: Sequence[int], last: int | None) -> Owners:
        start = roomiest(free) if last is None else last + 1
        return np.arange(start, start + num_pages) % len(free)

    def price(self, num_pages: int) -> int:
        return num_pages if num_pages > 1 else 0  # one page is computed by one rank anyway


class Contiguous:
    """As many pages as go there on one rank."""

    __slots__ = ()

    def pools(self, num_pages: tuple[int, ...]) -> tuple[int, ...]:
        return num_pages

    def wish(self, num_pages: int, free: Sequence[int], last: int | None) -> Owners:
        start = roomiest(free) if last is None else last
        left, parts = list(free), []
        while num_pages > 0:
            count = min(num_pages, left[start])
            parts.append(np.full(count, start, np.int64))
            num_pages -= count
            left[start] -= count
            start = roomiest(left)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def price(self, num_pages: int) -> int:  # noqa: ARG002 - one rank is as good as another
        return 0


class Replicate:
    """Every rank holds every page, in the same slot: what engines do that do not share a cache.

    So there is one pool, of the smallest size, and every ref names owner 0. What tells it apart
    from a cache of one rank is `PrefixCache.replicates`: a ref then stands for its slot on each of
    `PrefixCache.num_ranks` ranks.
    """

    __slots__ = ()

    def pools(self, num_pages: tuple[int, ...]) -> tuple[int, ...]:
        return (min(num_pages),)

    def wish(self, num_pages: int, free: Sequence[int], last: int | None) -> Owners:  # noqa: ARG002
        return np.zeros(num_pages, np.int64)

    def price(self, num_pages: int) -> int:  # noqa: ARG002 - there is but one pool
        return 0


PLACEMENTS: dict[str, Callable[[], PlacementPolicy]] = {
    "striped": Striped,
    "contiguous": Contiguous,
    "replicate": Replicate,
}


def make_placement(name: str) -> PlacementPolicy:
    """A policy by its name. Raises ConfigError if there is none of that name."""
    factory = PLACEMENTS.get(name)
    if factory is None:
        known = ", ".join(sorted(PLACEMENTS))
        raise ConfigError(f"unknown placement {name!r}; known: {known}")
    return factory()


def roomiest(free: Sequence[int]) -> int:
    """The rank with most free pages; of equals the first."""
    return max(range(len(free)), key=free.__getitem__)


def num_displaced(wish: Owners, free: Sequence[int]) -> int:
    """How many pages of a wish have no room where they ought to lie."""
    over = np.bincount(wish, minlength=len(free)) - np.array(free)
    return int(np.maximum(over, 0).sum())


def settle(wish: Owners, free: Sequence[int]) -> Owners:
    """The wish as far as there is room; the last pages of a full rank go to those with most room.

    In all there must be room for it.
    """
    if len(wish) == 1:
        return wish if free[wish[0]] else np.array([roomiest(free)], np.int64)
    left = (np.array(free) - np.bincount(wish, minlength=len(free))).tolist()
    if min(left) >= 0:
        return wish
    owners = wish.copy()
    for owner, rest in enumerate(left):
        if rest < 0:
            for page in np.flatnonzero(wish == owner)[rest:].tolist():
                other = roomiest(left)
                owners[page] = other
                left[other] -= 1
    return owners


def take_shares(owners: Owners, alloc: Callable[[int, int], bytes]) -> bytes:
    """Packed refs in page order; `alloc(owner, pages)` takes one owner's share, lowest first."""
    if len(owners) == 1:
        return alloc(int(owners[0]), 1)
    refs = np.empty(len(owners), np.int64)
    for owner, count in enumerate(np.bincount(owners).tolist()):
        if count:
            refs[owners == owner] = np.frombuffer(alloc(owner, count), np.int64)
    return refs.tobytes()
