"""Storage to host, while a request is queued: probe, then read what is there, run by run.

    queued --probe--> PROBING --read--> READING --(all, a gap, a failure)--> DONE
                         `-- nothing there --------------------------------->-'

Host pages are taken only for pages that storage has said it has. A page is read once, however many
requests are queued for it: the others wait for that read, and go on with their own when it has
ended, well or not. What has arrived joins the tree at once; how long the request waits for the
rest is the policy's business:

    best_effort     not at all          wait_complete   until everything is there
    timeout         a fixed time        auto            while reading is sooner than computing
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phloem.cache import PrefixCache
from phloem.cache.node import REF_BYTES
from phloem.core.clock import Clock
from phloem.core.tokens import TOKEN_BYTES
from phloem.core.transfer import TransferKind, TransferResult
from phloem.tiers.config import TierConfig
from phloem.tiers.cost import CostModel, Forced
from phloem.tiers.decisions import StorageWay
from phloem.tiers.flights import Flights
from phloem.tiers.keys import Links

__all__ = ["Prefetches"]

MIN_PAGES = 2  # fewer are computed sooner than asked for
RUN_PAGES = 64  # of one transfer: what has arrived is of use before the rest has
HOST_SHARE = 2  # at most half of the host is written to by prefetches at the same time
# Why a request starts before its prefetch has ended, by policy.
WENT_ON = {
    "auto": "computing the rest seems sooner than waiting for it",
    "best_effort": "the policy is not to wait",
    "timeout": "the time to wait is up",
    "wait_complete": "the request has left the queue",
}


class _Phase(enum.Enum):
    PROBING = "probing"
    READING = "reading"
    DONE = "done"


@dataclass(slots=True)
class _Prefetch:
    namespace: bytes
    tokens: bytes
    links: list[bytes]
    first_page: int  # the pages before it are on device or host, or were when it began
    queued_s: float
    phase: _Phase = _Phase.PROBING
    num_found: int = 0  # pages that storage has, from first_page on
    num_arrived: int = 0
    transfer_id: int = -1
    stopped: bool = False
    reason: str = ""  # why no more of it is read

    def ends(self, reason: str) -> None:
        """Nothing more is read."""
        self.phase, self.reason = _Phase.DONE, reason


class Prefetches:
    """Decides and follows PROBE and PREFETCH transfers, one request at a time each."""

    def __init__(
        self,
        cache: PrefixCache,
        flights: Flights,
        links: Links,
        config: TierConfig,
        *,
        clock: Clock,
        cost: CostModel,
        attached: Callable[[], bool],
    ) -> None:
        self._cache = cache
        self._leader = cache.leader
        self._page_bytes = cache.page_size * TOKEN_BYTES
        self._flights = flights
        self._links = links
        self._config = config
        self._clock = clock
        self._cost = cost
        self._attached = attached
        self._by_request: dict[str, _Prefetch] = {}
        self._pages_in_flight = 0
        self._links_in_flight: set[bytes] = set()
        self._followers: list[_Prefetch] = []  # wait for a page that another one reads
        self._abandoned = False
        self.num_late_pages = 0  # arrived after their request had gone on without them
        self.num_no_room = 0

    def begin(self, request_id: str, namespace: bytes, tokens: bytes, known_pages: int) -> None:
        """A request is queued whose first `known_pages` pages are on device or host."""
        last = (len(tokens) // TOKEN_BYTES - 1) // self._cache.page_size
        if last - known_pages < MIN_PAGES or not self._attached():
            return
        links = self._links.of(namespace, tokens[: last * self._page_bytes])
        prefetch = _Prefetch(namespace, tokens, links, known_pages, self._clock.now_s())
        self._by_request[request_id] = prefetch
        prefetch.transfer_id = self._flights.submit(
            TransferKind.PROBE,
            lambda result: self._probed(prefetch, result),
            links=tuple(links[known_pages:]),
            deadline_s=self._deadline_s(),
        )

    def may_start(self, request_id: str) -> bool:
        """Whether the request should go on with what there is."""
        prefetch = self._by_request.get(request_id)
        if prefetch is None or prefetch.phase is _Phase.DONE:
            return True
        if self._cost.forced is not None:
            return self._cost.forced is Forced.RECOMPUTE
        policy = self._config.prefetch_policy
        if policy == "best_effort":
            return True
        if policy == "wait_complete":
            return False
        waited = self._clock.now_s() - prefetch.queued_s
        if waited >= self._config.prefetch_timeout_s:
            return True
        return policy == "auto" and not self._is_worth_waiting(prefetch, waited)

    def look(self, request_id: str) -> StorageWay | None:
        """How it stands; None if storage was not asked."""
        prefetch = self._by_request.get(request_id)
        if prefetch is None:
            return None
        found, waited_s = prefetch.num_found, self._clock.now_s() - prefetch.queued_s
        policy = self._config.prefetch_policy
        if policy == "auto" and waited_s >= self._config.prefetch_timeout_s:
            policy = "timeout"
        return StorageWay(
            first_page=prefetch.first_page,
            asked_pages=len(prefetch.links) - prefetch.first_page,
            found_pages=found,
            read_pages=prefetch.num_arrived,
            waited_s=waited_s,
            read_s=self._cost.transfers[TransferKind.PREFETCH].seconds(found),
            compute_s=self._cost.prefill.seconds(found * self._cache.page_size),
            reason=prefetch.reason or WENT_ON[policy],
        )

    def end(self, request_id: str) -> tuple[int, int]:
        """The request starts, or has gone: read no more for it.

        Returns the pages that have arrived for it: the first one, and how many.
        """
        prefetch = self._by_request.pop(request_id, None)
        if prefetch is None:
            return 0, 0
        prefetch.stopped = True
        if prefetch.phase is not _Phase.DONE:
            self._flights.cancel(prefetch.transfer_id)
        return prefetch.first_page, prefetch.num_arrived

    def abandon(self) -> None:
        """The weights have changed: what is still to arrive must not be found by anybody."""
        self._abandoned = True
        for request_id in list(self._by_request):
            self.end(request_id)

    def _deadline_s(self) -> float:
        return self._clock.now_s() + self._config.storage_deadline_s

    def _is_worth_waiting(self, prefetch: _Prefetch, waited_s: float) -> bool:
        """Would what is still missing take longer to compute than to read, the wait included?"""
        if prefetch.phase is _Phase.PROBING:
            count = len(prefetch.links) - prefetch.first_page
            return waited_s < self._cost.prefill.seconds(count * self._cache.page_size)
        count = prefetch.num_found - prefetch.num_arrived
        read_s = self._cost.transfers[TransferKind.PREFETCH].seconds(count)
        compute_s = self._cost.prefill.seconds(count * self._cache.page_size)
        # A slow or dead backend makes the wait grow and the measured speed stay: both count.
        return max(read_s, waited_s) < compute_s

    def _probed(self, prefetch: _Prefetch, result: TransferResult) -> None:
        gaps = np.flatnonzero(~result.done)
        prefetch.num_found = int(gaps[0]) if len(gaps) else len(result.done)
        if prefetch.num_found < MIN_PAGES:
            prefetch.num_found = 0
        prefetch.phase = _Phase.READING
        if prefetch.num_found:
            self._read_on(prefetch)
        else:
            prefetch.ends("storage has none of it" if result.error is None else result.error)

    def _read_on(self, prefetch: _Prefetch) -> None:
        prefetch.num_arrived = max(prefetch.num_arrived, self._num_there(prefetch))
        left = prefetch.num_found - prefetch.num_arrived
        start = prefetch.first_page + prefetch.num_arrived
        if left > 0 and not prefetch.stopped and prefetch.links[start] in self._links_in_flight:
            self._followers.append(prefetch)
            return
        host = self._leader.host
        room = host.capacity // HOST_SHARE - self._pages_in_flight
        count = min(left, RUN_PAGES, room)
        if left <= 0:
            prefetch.ends("all that storage has was read")
            return
        if prefetch.stopped or not self._pays(left):
            prefetch.ends("computing the rest is sooner than reading it")
            return
        slots = host.allocate(count) if count > 0 else None
        if slots is None:
            self.num_no_room += 1
            prefetch.ends("the host has no room for more")
            return
        links = tuple(prefetch.links[start : start + count])
        self._pages_in_flight += count
        self._links_in_flight.update(links)

        def on_end(result: TransferResult) -> None:
            self._links_in_flight.difference_update(links)
            self._arrived(prefetch, start, slots, result)
            followers, self._followers = self._followers, []
            for follower in followers:
                self._read_on(follower)

        prefetch.transfer_id = self._flights.submit(
            TransferKind.PREFETCH, on_end, host=slots, links=links, deadline_s=self._deadline_s()
        )

    def _num_there(self, prefetch: _Prefetch) -> int:
        """Pages of what was found that are on device or host by now, whoever brought them."""
        end = (prefetch.first_page + prefetch.num_found) * self._page_bytes
        _, _, matched = self._leader.tree.find(prefetch.namespace, prefetch.tokens, end)
        return matched // self._page_bytes - prefetch.first_page

    def _pays(self, num_pages: int) -> bool:
        """Reading is expected to be sooner than computing, when anything is known of reading."""
        if self._config.prefetch_policy == "wait_complete":
            return True  # whoever chose it wants what is there
        line = self._cost.transfers[TransferKind.PREFETCH]
        compute_s = self._cost.prefill.seconds(num_pages * self._cache.page_size)
        return not line.measured or line.seconds(num_pages) < compute_s

    def _arrived(
        self, prefetch: _Prefetch, start: int, slots: bytes, result: TransferResult
    ) -> None:
        gaps = np.flatnonzero(~result.done)
        count = int(gaps[0]) if len(gaps) else len(result.done)
        self._pages_in_flight -= len(result.done)
        good, rest = self._leader.host.cut(slots, count)
        if rest:
            self._leader.host.free(rest)
        if good and not self._insert(prefetch, start, good):
            prefetch.ends("the pages before them have left meanwhile")
            return
        if prefetch.stopped:
            self.num_late_pages += count
        prefetch.num_arrived += count
        if rest:
            prefetch.ends("reading a page failed")  # a gap, or cut short
        else:
            self._read_on(prefetch)

    def _insert(self, prefetch: _Prefetch, start: int, slots: bytes) -> bool:
        """Put pages that have arrived below the page before them, if that is still there."""
        leader, tree, size = self._leader, self._leader.tree, self._page_bytes
        end = start + len(slots) // REF_BYTES
        node, pages, matched = tree.find(prefetch.namespace, prefetch.tokens, end * size)
        known = matched // size
        if known < start or self._abandoned or not self._cache.enabled:
            leader.host.free(slots)
            return False
        if known > start:  # somebody has computed, or read, some of them meanwhile
            doubles, slots = leader.host.cut(slots, known - start)
            leader.host.free(doubles)
        if not slots:
            return True
        if node is not tree.root and pages < node.num_pages:
            node = leader.split(node, pages)
            leader.touch(node)
        tokens = prefetch.tokens[known * size : end * size]
        leaf = leader.host.insert(node, prefetch.namespace, tokens, slots)
        leader.host.mark_stored(leaf, leaf.num_pages)
        return True
