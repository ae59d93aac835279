"""Admission: which waiting requests start in this pass, and with which pages.

A request starts when there is a row, a part of this step's slice of prefill, and room for all pages
of its prompt at once (so nothing can fail in the middle of a prefill) and for what the running
requests will probably ask for soon. A request whose next page is just being computed by another
one waits for that page rather than computing it twice.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from phloem.core.request import CachedTokens
from phloem.core.tokens import TOKEN_BYTES
from phloem.kv.sizing import pages_for_tokens
from phloem.sched.config import SchedulerConfig
from phloem.sched.counters import Counters
from phloem.sched.packing import would_get_tokens
from phloem.sched.policies import Policy, PolicyView
from phloem.sched.queue import WaitQueue
from phloem.sched.running import RunningSet
from phloem.sched.state import Phase, RequestState
from phloem.sched.windows import WindowBudget, first_to_compute

if TYPE_CHECKING:
    from phloem.cache import Match, PrefixCache, Reservation
    from phloem.tiers import TierController

__all__ = ["Admission", "Headroom"]

# Matches of queued requests in one pass; a long prompt counts as several.
REFRESHES_PER_PASS = 16
TRIES_PER_PASS = 32
TOKENS_PER_CREDIT = 8192


class Verdict(enum.Enum):
    """What became of one try."""

    ADMITTED = "admitted"
    WAITS = "waits"  # for a page that another request is computing, or for pages between tiers
    NO_ROOM = "no room"  # not enough pages
    NO_BUDGET = "no budget"  # the step has no prefill tokens left for it


class Headroom:
    """How far ahead the pages of running requests are kept free at admission, in tokens.

    A retraction shows that it was too little: doubled; afterwards it falls back slowly.
    """

    FIRST_STEP_TOKENS = 8
    MOST_TOKENS = 4096

    def __init__(self, least_tokens: int) -> None:
        self._least = float(least_tokens)
        self._tokens = self._least

    @property
    def tokens(self) -> int:
        return int(self._tokens)

    def on_pass(self) -> None:
        self._tokens = max(self._least, self._tokens * 0.99)

    def on_retraction(self) -> None:
        wanted = max(float(self.FIRST_STEP_TOKENS), self._tokens * 2)
        self._tokens = min(float(self.MOST_TOKENS), wanted)


class Admission:
    """Moves requests from the queue to the running set."""

    def __init__(
        self,
        *,
        cache: PrefixCache,
        queue: WaitQueue,
        running: RunningSet,
        policy: Policy,
        config: SchedulerConfig,
        counters: Counters,
        windows: WindowBudget,
        tiers: TierController | None = None,
    ) -> None:
        self._tiers = tiers
        self.headroom = Headroom(config.headroom_tokens)
        self._cache = cache
        self._queue = queue
        self._running = running
        self._policy = policy
        self._windows = windows
        self._counters = counters
        self._page_size = cache.page_size
        self._slice = config.prefill_step(cache.page_size)
        self._credit = 0
        self._remaining: list[int] = []  # tokens to compute of each running prefill
        self._leaders: list[RequestState] = []  # their prompts' last pages are not committed yet

    def find_match(self, request: RequestState) -> Match:
        """The longest cached prefix, at least one token being left to compute."""
        if request.match is None or request.match_version != self._cache.version:
            self._credit -= 1 + request.num_tokens // TOKENS_PER_CREDIT
            request.match = self._cache.match(
                request.request.namespace,
                request.known_tokens(),
                max_pages=self._max_cached_pages(request),
            )
            request.match_version = self._cache.version
            request.matched_pages = first_to_compute(request.match)
            request.kept_pages = request.match.full_pages
            on_host = request.match.num_pages + request.match.host_pages
            found = max(request.matched_pages, on_host)
            request.num_uncached = request.num_tokens - found * self._page_size
        return request.match

    def admit(self, make_view: Callable[[], PolicyView]) -> None:
        """Start what can start, in the order of the queue; skip what does not fit."""
        self.headroom.on_pass()
        if not len(self._queue) or not self._running.tables.num_free:
            return
        view = make_view()
        if self._policy.uses_cache:
            self._credit = REFRESHES_PER_PASS
            self._refresh_matches(view)
        self._credit = TRIES_PER_PASS
        self._look_at_running(self._running)
        for request, barrier in self._queue.candidates(view):
            if not self._may_try():
                break
            verdict = self._try(request, barrier=barrier)
            if barrier and verdict in (Verdict.NO_ROOM, Verdict.NO_BUDGET):
                break

    def _may_try(self) -> bool:
        """Is there a row, a prefill token left in this step, and time for one more match?"""
        return (
            self._running.tables.num_free > 0
            and self._credit > 0
            and would_get_tokens(self._remaining, 1, self._slice)
        )

    def _look_at_running(self, running: Iterable[RequestState]) -> None:
        self._remaining, self._leaders = [], []
        for request in running:
            if request.phase is Phase.PREFILL:
                self._remaining.append(request.prefill_end - request.num_planned)
            if request.num_computed < request.prefill_end:
                self._leaders.append(request)

    def _refresh_matches(self, view: PolicyView) -> None:
        """Bring a bounded number of queued requests up to date, in turn."""
        for _ in range(REFRESHES_PER_PASS):
            request = self._queue.next_to_refresh() if self._credit > 0 else None
            if request is None:
                return
            before = request.matched_pages
            self.find_match(request)
            if request.matched_pages != before:
                self._queue.rerank(request, view)

    def _try(self, request: RequestState, *, barrier: bool) -> Verdict:
        all_pages = pages_for_tokens(request.num_tokens, self._page_size)
        headroom = self._headroom_pages(request)
        room = self._cache.free_pages + self._cache.evictable_pages
        seems_too_large = all_pages - request.kept_pages + headroom > room
        if seems_too_large and not barrier:  # by its last known match: cheaper than a new one
            return Verdict.NO_ROOM
        if self._tiers is not None and not self._tiers.may_start(request.request_id):
            return Verdict.WAITS
        match = self.find_match(request)
        if self._is_being_computed(request, match):
            return Verdict.WAITS
        if not would_get_tokens(self._remaining, request.num_uncached, self._slice):
            return Verdict.NO_BUDGET
        num_new = all_pages - match.num_pages
        if not self._cache.can_reserve(match, num_new + headroom, restart=not match.host_pages):
            return Verdict.NO_ROOM
        if not self._windows.has_room(request, self._running):
            return Verdict.NO_ROOM
        if self._tiers is not None and not self._tiers.make_room(num_new, match):
            return Verdict.WAITS
        self._start(request, match, num_new, barrier=barrier)
        self._remaining.append(request.prefill_end - request.num_planned)
        self._leaders.append(request)
        return Verdict.ADMITTED

    def _start(self, request: RequestState, match: Match, num_new: int, *, barrier: bool) -> None:
        load_pages = 0
        if self._tiers is not None and request.may_load:
            load_pages = self._tiers.loadable_pages(request.request_id, match, request.num_tokens)
        elif self._tiers is not None:
            self._tiers.gives_up_loading(request.request_id, match, request.num_tokens)
        self._queue.admit(request, barrier=barrier)
        reservation = self._cache.reserve(match, num_new, load_pages=load_pages, restart=True)
        self._running.start(request, reservation)
        if self._tiers is not None:
            self._start_load(self._tiers, request, reservation)
        self._count(request)

    def _start_load(
        self, tiers: TierController, request: RequestState, reservation: Reservation
    ) -> None:
        first, count = tiers.leaves_queue(request.request_id)
        if request.load_pages:
            request.load_id = tiers.start_load(reservation, after_step=self._counters.steps - 1)
            end = request.num_planned // self._page_size
            start = max(first, end - request.load_pages)
            request.storage_pages = max(0, min(first + count, end) - start)

    def _headroom_pages(self, request: RequestState) -> int:
        if not len(self._running):
            return 0  # alone, a request always fits: `Scheduler.add` has refused what does not
        horizon = self.headroom.tokens
        return self._running.expected_growth(horizon) + self._running.own_growth(request, horizon)

    def _is_being_computed(self, request: RequestState, match: Match) -> bool:
        """Is the first page past the match in a running prefill, planned or in flight?

        Or, where the window state of what matched is gone, that state?
        """
        page = match.full_pages
        if match.num_pages < page and self._is_being_revived(request, page):
            return True
        if page >= self._max_cached_pages(request) or not self._cache.enabled:
            return False
        page_bytes = self._page_size * TOKEN_BYTES
        start, end = page * page_bytes, (page + 1) * page_bytes
        tokens = request.known_tokens()
        for leader in self._leaders:
            if (
                leader.num_computed <= page * self._page_size  # else it is flushed or evicted
                and leader.prefill_tokens[start:end] == tokens[start:end]
                and leader.request.namespace == request.request.namespace
                and leader.prefill_tokens.startswith(tokens[:end])
            ):
                return True
        return False

    def _is_being_revived(self, request: RequestState, num_pages: int) -> bool:
        """Does a running prefill compute window state for exactly these pages of the prompt?"""
        end = num_pages * self._page_size
        for leader in self._leaders:
            if (
                leader.num_computed < end == leader.write_from
                and leader.request.namespace == request.request.namespace
                and leader.prefill_tokens.startswith(request.known_tokens()[: end * TOKEN_BYTES])
            ):
                return True
        return False

    def _count(self, request: RequestState) -> None:
        """Prompt and hits at first admission only; recomputation apart from both (O-08, O-09)."""
        cached = request.num_computed
        if request.write_from > request.num_planned:
            self._counters.restarts += 1
            self._counters.restarted_tokens += request.write_from - request.num_planned
        if request.cached is None:
            request.cached = CachedTokens(device=cached)
            self._counters.prompt_tokens += request.num_prompt
            self._counters.cached_tokens += cached
            request.counts_load = request.load_id is not None
            loading = request.load_pages * self._page_size
            self._counters.computed_tokens += request.num_prompt - cached - loading
        else:
            loading = request.load_pages * self._page_size
            self._counters.recomputed_tokens += max(0, request.was_computed - cached - loading)

    def _max_cached_pages(self, request: RequestState) -> int:
        return (request.num_tokens - 1) // self._page_size
