"""Storage to host, window state: exactly the tail of the longest length that can be restored.

    page     0 ...... base ........ known ............. limit
    full     |---- device, host ------|---- in storage ---|
    window            |.. device, host or storage, page by page ..|

A length beyond `base`, from which the request could go on anyway, can be restored if its full pages
are there up to it, and the window state of its last T pages is on the device, on the host, or in
storage. The longest one is read, or the one of which the cost model expects most.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt

from phloem.cache import Match, PrefixCache, WindowMatch
from phloem.cache.window_host import WindowHost
from phloem.cache.window_match import runs_of
from phloem.core.tokens import TOKEN_BYTES
from phloem.core.transfer import TransferKind
from phloem.tiers.config import TierConfig
from phloem.tiers.cost import CostModel
from phloem.tiers.window_path import WindowPath
from phloem.tiers.window_writes import WindowWrites

__all__ = ["TailRead", "TailReads"]

_Mask = npt.NDArray[np.bool_]
_NOTHING: _Mask = np.empty(0, dtype=np.bool_)


@dataclass(slots=True)
class TailRead:
    """What is known of one request's tails. `target`: the length to restore."""

    namespace: bytes
    tokens: bytes
    links: list[bytes]
    base: int
    first_page: int  # storage is asked for window state from here on
    target: int
    stored: _Mask = field(default_factory=lambda: _NOTHING)  # from first_page on
    lengths: tuple[int, ...] = ()  # that can be restored, beyond base
    num_missing: int = 0  # pages that the target's tail lacks on device and host


class TailReads:
    """Chooses what to restore, and puts window state that has arrived where it belongs."""

    def __init__(
        self,
        cache: PrefixCache,
        host: WindowHost,
        writes: WindowWrites,
        cost: CostModel,
        config: TierConfig,
    ) -> None:
        assert cache.window is not None, "the cache has no windows"
        self._tree = cache.leader.tree
        self._page_size = cache.page_size
        self._tail_pages = cache.window.tail_pages(cache.page_size)
        self._host = host
        self._writes = writes
        self._cost = cost
        self._config = config

    @staticmethod
    def known(match: Match) -> tuple[int, int]:
        """(full pages on device or host, pages that need not be computed if nothing is read)."""
        match = cast(WindowMatch, match)
        restart = match.restart_start() // match.page_size
        return (
            match.full_pages + match.host_full_pages,
            max(match.num_pages + match.host_pages, restart),
        )

    def begin(self, match: Match, links: list[bytes], base: int) -> TailRead:
        """A request is queued: ask storage for window state from the answer's `first_page` on."""
        first = max(0, base + 1 - self._tail_pages)
        return TailRead(match.namespace, match.tokens, links, base, first, target=base)

    def choose(self, read: TailRead, limit: int) -> None:
        """Storage has answered; full pages are, or will be, there up to `limit`."""
        asked = read.links[read.first_page :]
        self._note(asked, read.stored)
        there = np.zeros(limit, dtype=np.bool_)
        path = self._path(read, limit)
        there[: len(path)] = path.anywhere
        known = there.copy()
        stored = read.stored[: max(0, limit - read.first_page)]
        there[read.first_page : read.first_page + len(stored)] |= stored
        tail = self._tail_pages
        lengths: list[int] = []
        for start, stop in runs_of(there):
            lengths.extend(range(start + tail if start else 1, stop + 1))
        if not tail:
            lengths = list(range(limit + 1))
        read.lengths = tuple(length for length in lengths if length > read.base)
        if read.lengths:
            read.target = self._best(read, known, len(path))
            first = max(0, read.target - tail)
            read.num_missing = int(np.count_nonzero(~known[first : read.target]))

    def missing(self, read: TailRead) -> list[int]:
        """Pages to be read for the target now; none if it is complete, or cannot be completed."""
        path = self._path(read, read.target)
        if len(path) < read.target:
            return []  # its full pages have gone again
        first = max(0, read.target - self._tail_pages)
        self._host.touch(slot for slot in path.slots[first:].tolist() if slot >= 0)
        gone = first + np.flatnonzero(~path.anywhere[first:])
        in_storage = gone[gone >= read.first_page]
        if len(in_storage) < len(gone) or not read.stored[in_storage - read.first_page].all():
            return []
        pages: list[int] = gone.tolist()
        return pages

    def allocate(self, num_pages: int) -> bytes | None:
        """Slots to read to; None if there is no room."""
        return self._host.allocate(num_pages)

    def arrived(self, read: TailRead, pages: list[int], slots: bytes, *, good: bool) -> int:
        """What was read for `pages` has arrived, or not; returns how many pages are of use."""
        path = self._path(read, read.target)
        if not good or len(path) < read.target:
            self._host.free(slots)
            return 0
        self._writes.are_stored(read.links[page] for page in pages)
        return self._host.attach(slots, [path.place_of(page) for page in pages])

    def _path(self, read: TailRead, num_pages: int) -> WindowPath:
        """What the tree has of the first `num_pages` pages."""
        end = num_pages * self._page_size * TOKEN_BYTES
        node, count, _ = self._tree.find(read.namespace, read.tokens, end)
        return WindowPath.down_to(node, count)

    def _note(self, links: list[bytes], stored: _Mask) -> None:
        self._writes.are_stored(link for link, there in zip(links, stored, strict=False) if there)
        self._writes.are_lost(link for link, there in zip(links, stored, strict=False) if not there)

    def _best(self, read: TailRead, known: _Mask, full_known: int) -> int:
        """The longest length, or that with which the request is expected to be done first."""
        line = self._cost.transfers[TransferKind.PREFETCH]
        longest = read.lengths[-1]
        if self._config.prefetch_policy == "wait_complete" or not line.measured:
            return longest
        num_tokens = len(read.tokens) // TOKEN_BYTES
        missing = np.concatenate([[0], np.cumsum(~known)])

        def total_s(length: int) -> float:
            first = max(0, length - self._tail_pages)
            pages = self._cost.in_pages(1, int(missing[length] - missing[first]))
            pages += self._cost.in_pages(0, max(0, length - full_known))
            computed = num_tokens - length * self._page_size
            return line.seconds(pages) + self._cost.prefill.seconds(computed)

        return min(reversed(read.lengths), key=total_s)
