"""Which rank owns the next pages of a chain: decided by the leader.

The pools of all ranks are one room: where a page lies is a wish, that it lies somewhere is not.
Whether pages can be had at all is a question about sums (`Leader.allocate`), and a page whose rank
is full goes to the one with most room.

    name         pages of a chain on 3 ranks
    striped      0 1 2 0 1 2 0 1 2
    contiguous   0 0 0 0 0 0 1 1 1              as many on one rank as go there
    replicate    every rank has every page      see `Replicate`

A run begins where it leaves the ranks' room most even, so many short ones are spread even if all of
them continue the same prefix; where that is no matter, so that it ends on the rank on which fewest
others end. For that one computes its next tokens: a rank computes what is written to its pages. A
page that is added later goes where fewest decode, among those to the rank after its last page's.

There is no quarantine of freed pages. A rank begins step s + 1 when all have finished step s, so a
page freed in the plan of a step is read by nobody when a later step writes to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from phloem.cache.window import WindowConfig
from phloem.core.errors import ConfigError

__all__ = [
    "PLACEMENTS",
    "Contiguous",
    "PlacementPolicy",
    "Replicate",
    "Striped",
    "make_placement",
    "num_displaced",
    "placed_pools",
    "settle",
    "take_pages",
    "take_shares",
]


class PlacementPolicy(Protocol):
    """Says where a run of pages ought to lie: page i on rank (start + step * i) mod N."""

    @property
    def step(self) -> int:
        """From the owner of a page to that of the next."""
        ...

    def pools(self, num_pages: tuple[int, ...]) -> tuple[int, ...]:
        """The pools that pages are allocated from, given each rank's."""
        ...

    def start(
        self, num_pages: int, free: Sequence[int], busy: Sequence[int], last: int | None
    ) -> int:
        """The owner of the first page, after one that `last` owns, or of a new run (None).

        `free`: how many free pages each owner has; `busy`: how many other requests have their last
        page there. Asked once for each run.
        """
        ...

    def price(self, num_pages: int) -> int:
        """How many cached pages may be given up for that, beyond those that must go."""
        ...


class Striped:
    """Page after page from rank to rank: causal work is even to a page.

    The price. Where all pools are full, the ranks that evicted pages leave room on are not those
    of a stripe. On recorded traces and 4 ranks the busiest rank then gets up to 8.0 % more pages
    than its share if nothing is given up for it; 3.8 % with half as many pages as the run has, at
    most, and hits are 0.993 to 1.0 of one rank's. See docs/cache.md.
    """

    __slots__ = ()
    step = 1

    def pools(self, num_pages: tuple[int, ...]) -> tuple[int, ...]:
        return num_pages

    def start(
        self, num_pages: int, free: Sequence[int], busy: Sequence[int], last: int | None
    ) -> int:
        ranks = len(free)
        if last is None:
            # The ranks from the start on get one page more than the others: those with most room.
            more = num_pages % ranks
            room = sum(free[:more])
            best, best_start = (room, -busy[num_pages % ranks - 1]), 0
            for start in range(1, ranks):
                room += free[(start + more - 1) % ranks] - free[start - 1]
                key = (room, -busy[(start + num_pages - 1) % ranks])
                if key > best:
                    best, best_start = key, start
            return best_start
        after = (last + 1) % ranks
        if num_pages > 1 or not busy[after]:
            return after
        return min(range(after, after + ranks), key=lambda rank: busy[rank % ranks]) % ranks

    def price(self, num_pages: int) -> int:
        return num_pages // 2  # none for a single page: it is computed by one rank anyway


class Contiguous:
    """As many pages as go there on one rank."""

    __slots__ = ()
    step = 0

    def pools(self, num_pages: tuple[int, ...]) -> tuple[int, ...]:
        return num_pages

    def start(
        self,
        num_pages: int,  # noqa: ARG002
        free: Sequence[int],
        busy: Sequence[int],  # noqa: ARG002
        last: int | None,
    ) -> int:
        return _roomiest(free) if last is None else last

    def price(self, num_pages: int) -> int:  # noqa: ARG002 - one rank is as good as another
        return 0


class Replicate:
    """Every rank holds every page, in the same slot: what engines do that do not share a cache.

    So there is one pool, of the smallest size, and every ref names owner 0. What tells it apart
    from a cache of one rank is `PrefixCache.replicates`: a ref then stands for its slot on each of
    `PrefixCache.num_ranks` ranks.
    """

    __slots__ = ()
    step = 0

    def pools(self, num_pages: tuple[int, ...]) -> tuple[int, ...]:
        return (min(num_pages),)

    def start(self, *_: object) -> int:
        return 0

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


def placed_pools(
    policy: PlacementPolicy, num_pages: tuple[int, ...], window: WindowConfig | None
) -> tuple[tuple[int, ...], WindowConfig | None]:
    """The pools that pages of both kinds are allocated from, given those of each rank."""
    if window is not None:
        window = replace(window, pages=policy.pools(window.pages))
    return policy.pools(num_pages), window


def num_displaced(num_pages: int, free: Sequence[int], start: int, step: int) -> int:
    """How many pages of a run have no room where they ought to lie."""
    over = map(int.__sub__, _counts(num_pages, len(free), start, step), free)
    return sum(count for count in over if count > 0)


def settle(num_pages: int, free: Sequence[int], start: int, step: int) -> list[int]:
    """The owner of each page of a run; the last ones of a full rank go to those with most room.

    In all there must be room.
    """
    own = list(map(min, _counts(num_pages, len(free), start, step), free))
    left = list(map(int.__sub__, free, own))
    owners, other = [], -1
    for page in range(num_pages):
        owner = (start + step * page) % len(free)
        if own[owner]:
            own[owner] -= 1
        else:
            if step or other < 0 or not left[other]:
                other = _roomiest(left)
            owner = other
            left[owner] -= 1
        owners.append(owner)
    return owners


def take_pages(
    num_pages: int, free: Sequence[int], start: int, step: int, alloc: Callable[[int, int], bytes]
) -> bytes:
    """Packed refs of a run in page order; `alloc(owner, pages)` takes one owner's share."""
    if num_displaced(num_pages, free, start, step):
        return take_shares(settle(num_pages, free, start, step), alloc)
    if not step or num_pages == 1:
        return alloc(start, num_pages)
    ranks = len(free)
    counts = _counts(num_pages, ranks, start, step)
    refs = array("q", bytes(8 * num_pages))
    for first in range(min(ranks, num_pages)):
        owner = (start + step * first) % ranks
        refs[first::ranks] = array("q", alloc(owner, counts[owner]))
    return refs.tobytes()


def take_shares(owners: Sequence[int], alloc: Callable[[int, int], bytes]) -> bytes:
    """Packed refs in page order, given each page's owner; the lowest owner's share comes first."""
    if len(owners) == 1:
        return alloc(owners[0], 1)
    shares = {
        owner: iter(array("q", alloc(owner, owners.count(owner)))) for owner in sorted(set(owners))
    }
    return array("q", [next(shares[owner]) for owner in owners]).tobytes()


def _roomiest(free: Sequence[int]) -> int:
    """The rank with most free pages; of equals the first."""
    return free.index(max(free))


def _counts(num_pages: int, num_owners: int, start: int, step: int) -> list[int]:
    """How many pages of a run each owner ought to have; `step` is 0 or 1."""
    counts = [0] * num_owners
    if not step:
        counts[start] = num_pages
        return counts
    whole, rest = divmod(num_pages, num_owners)
    for place in range(num_owners):
        counts[(start + place) % num_owners] = whole + (place < rest)
    return counts
