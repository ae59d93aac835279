"""Which rank owns the next pages of a chain: decided by the leader, page by page.

The pools of all ranks are one room: where a page lies is a wish, that it lies somewhere is not. So
a page goes to another rank before anything cached is given up for it, and whether pages can be had
at all is a question about the sums (`Leader.allocate`).

    name         pages of a chain on 3 ranks    when its rank is full
    striped      0 1 2 0 1 2 0 1 2              the rank with most room
    contiguous   0 0 0 0 0 0 1 1 1              the rank with most room
    replicate    every rank has every page      as one rank: see `Replicate`

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
    "take_shares",
]

Owners: TypeAlias = npt.NDArray[np.int64]  # (num_pages,): the owner of each page, in page order


class PlacementPolicy(Protocol):
    """Names owners; `free` says how many free pages each has, in all at least `num_pages`.

    Each owner is named at most as often as it has free pages.
    """

    def pools(self, num_pages: tuple[int, ...]) -> tuple[int, ...]:
        """The pools that pages are allocated from, given each rank's."""
        ...

    def begin(self, num_pages: int, free: Sequence[int]) -> Owners:
        """The owners of a request's first new pages."""
        ...

    def go_on(self, num_pages: int, free: Sequence[int], last: int) -> Owners:
        """The owners of the pages right after one that `last` owns."""
        ...


class Striped:
    """Page after page from rank to rank: causal work is even to a page."""

    __slots__ = ()

    def pools(self, num_pages: tuple[int, ...]) -> tuple[int, ...]:
        return num_pages

    def begin(self, num_pages: int, free: Sequence[int]) -> Owners:
        return _stripe(num_pages, free, _roomiest(free))

    def go_on(self, num_pages: int, free: Sequence[int], last: int) -> Owners:
        return _stripe(num_pages, free, (last + 1) % len(free))


class Contiguous:
    """As many pages as go there on one rank."""

    __slots__ = ()

    def pools(self, num_pages: tuple[int, ...]) -> tuple[int, ...]:
        return num_pages

    def begin(self, num_pages: int, free: Sequence[int]) -> Owners:
        return _fill(num_pages, free, _roomiest(free))

    def go_on(self, num_pages: int, free: Sequence[int], last: int) -> Owners:
        return _fill(num_pages, free, last)


class Replicate:
    """Every rank holds every page, in the same slot: what engines do that do not share a cache.

    So there is one pool, of the smallest size, and every ref names owner 0. What tells it apart
    from a cache of one rank is `PrefixCache.replicates`: a ref then stands for its slot on each of
    `PrefixCache.num_ranks` ranks.
    """

    __slots__ = ()

    def pools(self, num_pages: tuple[int, ...]) -> tuple[int, ...]:
        return (min(num_pages),)

    def begin(self, num_pages: int, free: Sequence[int]) -> Owners:  # noqa: ARG002
        return np.zeros(num_pages, np.int64)

    def go_on(self, num_pages: int, free: Sequence[int], last: int) -> Owners:  # noqa: ARG002
        return np.zeros(num_pages, np.int64)


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


def take_shares(owners: Owners, alloc: Callable[[int, int], bytes]) -> bytes:
    """Packed refs in page order; `alloc(owner, pages)` takes one owner's share, lowest first."""
    if len(owners) == 1:
        return alloc(int(owners[0]), 1)
    refs = np.empty(len(owners), np.int64)
    for owner, count in enumerate(np.bincount(owners).tolist()):
        if count:
            refs[owners == owner] = np.frombuffer(alloc(owner, count), np.int64)
    return refs.tobytes()


def _roomiest(free: Sequence[int]) -> int:
    """The rank with most free pages; of equals the first."""
    return max(range(len(free)), key=free.__getitem__)


def _stripe(num_pages: int, free: Sequence[int], start: int) -> Owners:
    if num_pages == 1:
        return np.array([start if free[start] else _roomiest(free)], np.int64)
    owners = np.arange(start, start + num_pages) % len(free)
    left = (np.array(free) - np.bincount(owners, minlength=len(free))).tolist()
    for owner, rest in enumerate(left):
        if rest < 0:  # the last pages of its share go to others
            for page in np.flatnonzero(owners == owner)[rest:].tolist():
                other = _roomiest(left)
                owners[page] = other
                left[other] -= 1
    return owners


def _fill(num_pages: int, free: Sequence[int], start: int) -> Owners:
    left = list(free)
    parts = []
    while num_pages:
        count = min(num_pages, left[start])
        parts.append(np.full(count, start, np.int64))
        num_pages -= count
        left[start] -= count
        start = _roomiest(left)
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
