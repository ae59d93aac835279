"""Storage to host, while a request is queued: probe, then read what is there, run by run.

    queued --probe--> PROBING --read--> READING --(all, a gap, a failure)--> DONE
                         `-- nothing there --------------------------------->-'

Host pages are taken only for pages that storage has said it has. A page is read once, however many
requests are queued for it: the others wait for that read, and go on with their own when it has
ended, well or not. What has arrived joins the tree at once; how long the request waits for the
rest is the policy's business:

    best_effort     not at all          wait_complete   until everything is there
    timeout         a fixed time        auto            while reading is sooner than computing

Where layers have windows, both components are asked for, full pages are read up to a length that
can be restored, and then the tail of that length: see `window_prefetch`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from phloem.cache import Match, PrefixCache
from phloem.cache.node import REF_BYTES
from phloem.core.clock import Clock
from phloem.core.tokens import TOKEN_BYTES
from phloem.core.transfer import TransferKind, TransferResult
from phloem.tiers.config import TierConfig
from phloem.tiers.cost import CostModel, Forced
from phloem.tiers.decisions import StorageWay
from phloem.tiers.flights import Flights, OnEnd
from phloem.tiers.keys import Links
from phloem.tiers.window_prefetch import TailRead, TailReads

__all__ = ["Prefetches"]

MIN_PAGES = 2  # fewer are computed sooner than asked for
RUN_PAGES = 64  # of one transfer: what has arrived is of use before the rest has
ALL_READ = "all that storage has was read"
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
    base: int  # pages that need not be computed if nothing is read
    phase: _Phase = _Phase.PROBING
    num_found: int = 0  # pages that storage has, from first_page on
    num_arrived: int = 0
    transfer_ids: tuple[int, ...] = ()
    stopped: bool = False
    reason: str = ""  # why no more of it is read
    tail: TailRead | None = None  # of models with windows

    def ends(self, reason: str) -> None:
        """Nothing more is read."""
        self.phase, self.reason = _Phase.DONE, reason

    @property
    def gain(self) -> int:
        """Pages that need not be computed if what is missing arrives."""
        missing = self.num_found - self.num_arrived
        return missing if self.tail is None else self.tail.target - self.base


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
        tails: TailReads | None = None,
    ) -> None:
        self._tails = tails
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
        self._links_in_flight: tuple[set[bytes], set[bytes]] = (set(), set())  # by component
        self._followers: list[_Prefetch] = []  # wait for a page that another one reads
        self._abandoned = False
        self.num_late_pages = 0  # arrived after their request had gone on without them
        self.num_no_room = 0

    def begin(self, request_id: str, match: Match) -> None:
        """A request is queued of which `match` is on device or host."""
        namespace, tokens = match.namespace, match.tokens
        last = (len(tokens) // TOKEN_BYTES - 1) // self._cache.page_size
        known = base = match.num_pages + match.host_pages
        if self._tails is not None:
            known, base = self._tails.known(match)
        if last - base < MIN_PAGES or not self._attached():
            return
        links = self._links.of(namespace, tokens[: last * self._page_bytes])
        prefetch = _Prefetch(namespace, tokens, links, known, self._clock.now_s(), base)
        self._by_request[request_id] = prefetch
        if self._tails is not None:
            prefetch.tail = self._tails.begin(match, links, base)
        for component in range(1 if prefetch.tail is None else 2):
            self._probe(prefetch, component)

    def _probe(self, prefetch: _Prefetch, component: int) -> None:
        first = prefetch.first_page
        if component and prefetch.tail is not None:
            first = prefetch.tail.first_page
        if first >= len(prefetch.links):
            return  # nothing of it is missing
        prefetch.transfer_ids += (
            self._flights.submit(
                TransferKind.PROBE,
                lambda result: self._probed(prefetch, component, result),
                component=component,
                links=tuple(prefetch.links[first:]),
                deadline_s=self._deadline_s(),
            ),
        )

    def restorable_lengths(self, request_id: str) -> tuple[int, ...]:
        """After how many pages a queued request could go on with what storage has, as far as it
        has been asked; ascending."""
        prefetch = self._by_request.get(request_id)
        if prefetch is None or prefetch.phase is _Phase.PROBING:
            return ()
        if prefetch.tail is not None:
            return prefetch.tail.lengths
        first = prefetch.first_page + 1
        return tuple(range(first, first + prefetch.num_found))

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
            for transfer_id in prefetch.transfer_ids:
                self._flights.cancel(transfer_id)
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
            count = len(prefetch.links) - prefetch.base
            return waited_s < self._cost.prefill.seconds(count * self._cache.page_size)
        read_s = self._cost.transfers[TransferKind.PREFETCH].seconds(self._left(prefetch))
        compute_s = self._cost.prefill.seconds(prefetch.gain * self._cache.page_size)
        # A slow or dead backend makes the wait grow and the measured speed stay: both count.
        return max(read_s, waited_s) < compute_s

    def _left(self, prefetch: _Prefetch) -> float:
        """Pages that are still to be read, as the cost model counts them."""
        left = self._cost.in_pages(0, prefetch.num_found - prefetch.num_arrived)
        if prefetch.tail is not None:
            left += self._cost.in_pages(1, prefetch.tail.num_missing)
        return left

    def _probed(self, prefetch: _Prefetch, component: int, result: TransferResult) -> None:
        if component == 0:
            gaps = np.flatnonzero(~result.done)
            prefetch.num_found = int(gaps[0]) if len(gaps) else len(result.done)
        elif prefetch.tail is not None:
            prefetch.tail.stored = result.done
        prefetch.transfer_ids = tuple(i for i in prefetch.transfer_ids if i != result.id)
        if prefetch.transfer_ids:
            return  # the other component has not been asked yet
        if prefetch.tail is not None and self._tails is not None:
            limit = prefetch.first_page + prefetch.num_found
            self._tails.choose(prefetch.tail, limit)
            prefetch.num_found = max(0, prefetch.tail.target - prefetch.first_page)
        if prefetch.gain < MIN_PAGES:
            prefetch.num_found = 0
            if prefetch.tail is not None:
                prefetch.tail.target = prefetch.base
        prefetch.phase = _Phase.READING
        if prefetch.gain > 0:
            self._read_on(prefetch)
        else:
            prefetch.ends("storage has none of it" if result.error is None else result.error)

    def _read_on(self, prefetch: _Prefetch) -> None:
        prefetch.num_arrived = max(prefetch.num_arrived, self._num_there(prefetch))
        left = prefetch.num_found - prefetch.num_arrived
        start = prefetch.first_page + prefetch.num_arrived
        if left > 0 and not prefetch.stopped and prefetch.links[start] in self._links_in_flight[0]:
            self._followers.append(prefetch)
            return
        host = self._leader.host
        count = min(left, RUN_PAGES, host.capacity // HOST_SHARE - self._pages_in_flight)
        wants_tail = left <= 0 and prefetch.tail is not None and prefetch.gain > 0
        if left <= 0 and not wants_tail:
            prefetch.ends(ALL_READ)
            return
        if prefetch.stopped or not self._pays(prefetch):
            prefetch.ends("computing the rest is sooner than reading it")
            return
        if wants_tail:
            self._read_tail(prefetch)
            return
        slots = host.allocate(count) if count > 0 else None
        if slots is None:
            self.num_no_room += 1
            prefetch.ends("the host has no room for more")
            return
        links = tuple(prefetch.links[start : start + count])
        self._pages_in_flight += count
        self._read(prefetch, 0, slots, links, partial(self._arrived, prefetch, start, slots))

    def _read(
        self,
        prefetch: _Prefetch,
        component: int,
        slots: bytes,
        links: tuple[bytes, ...],
        on_end: OnEnd,
    ) -> None:
        """Start a read; when it has ended, and `on_end` has heard, those that waited go on."""
        in_flight = self._links_in_flight[component]
        in_flight.update(links)

        def ended(result: TransferResult) -> None:
            in_flight.difference_update(links)
            on_end(result)
            followers, self._followers = self._followers, []
            for follower in followers:
                self._read_on(follower)

        sent = self._flights.submit(
            TransferKind.PREFETCH,
            ended,
            component=component,
            host=slots,
            links=links,
            deadline_s=self._deadline_s(),
        )
        prefetch.transfer_ids = (sent,)

    def _num_there(self, prefetch: _Prefetch) -> int:
        """Pages of what was found that are on device or host by now, whoever brought them."""
        end = (prefetch.first_page + prefetch.num_found) * self._page_bytes
        _, _, matched = self._leader.tree.find(prefetch.namespace, prefetch.tokens, end)
        return matched // self._page_bytes - prefetch.first_page

    def _read_tail(self, prefetch: _Prefetch) -> None:
        """All full pages are there: read what their tail lacks."""
        tails, tail = self._tails, prefetch.tail
        assert tails is not None, "the model has no windows"
        assert tail is not None, "the model has no windows"
        pages = tails.missing(tail)
        links = tuple(prefetch.links[page] for page in pages)
        if not self._links_in_flight[1].isdisjoint(links):
            self._followers.append(prefetch)
            return
        slots = tails.allocate(len(pages)) if pages else None
        if slots is None:
            self.num_no_room += bool(pages)
            prefetch.ends("the host has no room for more" if pages else ALL_READ)
            return

        def on_end(result: TransferResult) -> None:
            good = bool(result.done.all()) and not self._abandoned and self._cache.enabled
            prefetch.ends(ALL_READ if good else result.error or "the tail did not arrive")
            taken = tails.arrived(tail, pages, slots, good=good)
            if prefetch.stopped:
                self.num_late_pages += taken

        self._read(prefetch, 1, slots, links, on_end)

    def _pays(self, prefetch: _Prefetch) -> bool:
        """Reading is expected to be sooner than computing, when anything is known of reading."""
        if self._config.prefetch_policy == "wait_complete":
            return True  # whoever chose it wants what is there
        line = self._cost.transfers[TransferKind.PREFETCH]
        compute_s = self._cost.prefill.seconds(prefetch.gain * self._cache.page_size)
        return not line.measured or line.seconds(self._left(prefetch)) < compute_s

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
