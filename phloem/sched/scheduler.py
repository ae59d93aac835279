"""The scheduler: what the next step computes, and what the last one means.

    plan:   decodes that are due (retracting the newest where pages run out)
            admission in policy order
            a slice of prefill, the shortest first; without one, decodes that were not due
    apply:  tokens become known, full pages join the tree, requests end

Plan k+1 may be made while step k runs: tokens of step k are then futures (see `core.plan`). A
request that turns out to have ended in k has a wasted row in k+1, which `serial` tells apart.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from phloem.core.errors import BadRequest, Overloaded
from phloem.core.plan import RowPlan, RowResult, StepPlan, StepResult
from phloem.core.refs import PageRefs
from phloem.core.remote import IN_PLACE
from phloem.core.request import FinishReason, GenerateRequest, OutputChunk
from phloem.core.stats import EngineStats
from phloem.sched.admission import Admission
from phloem.sched.chunks import output_chunk
from phloem.sched.config import SchedulerConfig
from phloem.sched.counters import Counters
from phloem.sched.hot_reads import HotReads
from phloem.sched.limits import check_request
from phloem.sched.packing import pack_prefills
from phloem.sched.policies import PolicyView, get_policy
from phloem.sched.queue import WaitQueue
from phloem.sched.rows import decode_row, prefill_row
from phloem.sched.running import RunningSet
from phloem.sched.state import Phase, RequestState
from phloem.sched.supply import PageSupply
from phloem.sched.turns import Turns
from phloem.sched.windows import WindowBudget

if TYPE_CHECKING:
    from phloem.cache import PrefixCache
    from phloem.cache.remote_choice import RemoteChooser
    from phloem.tiers import LoadEnd, TierController

__all__ = ["Scheduler"]


class Scheduler:
    """Owns the queue, the running set and, through `cache`, all pages. Single-threaded.

    `remote` says how ranks read each other's pages; None: in place, or all pages have one owner.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        tiers: TierController | None = None,
        remote: RemoteChooser | None = None,
    ) -> None:
        self.config = config
        self.cache = cache
        self.tiers = tiers
        self.remote = remote
        self._page_size = cache.page_size
        self._policy = get_policy(config.policy)
        self._queue = WaitQueue(self._policy)
        self._running = RunningSet(
            max_running=config.max_running, page_size=cache.page_size, tiers=tiers
        )
        self._counters = Counters()
        self._hot_reads = HotReads(cache, self._running)
        self._slice = config.prefill_step(cache.page_size)
        self._windows = WindowBudget(
            cache,
            max_prefill_tokens=self._slice.tokens,
            max_model_len=config.max_model_len,
        )
        self._supply = PageSupply(
            self._running,
            self._windows,
            page_size=cache.page_size,
            retract=self._retract,
            tiers=tiers,
        )
        self._admission = Admission(
            cache=cache,
            queue=self._queue,
            running=self._running,
            policy=self._policy,
            config=config,
            counters=self._counters,
            windows=self._windows,
            tiers=tiers,
        )
        self._requests: dict[str, RequestState] = {}  # queued and running
        self._in_flight: deque[StepPlan] = deque()
        self._turns = Turns(config.max_prefill_tokens, self._slice)
        self._seeds = random.Random(config.seed)
        self._pass_no = 0

    # What callers ask for.

    def check(self, request: GenerateRequest) -> None:
        """Raise BadRequest for what can never be served, saying the numbers."""
        check_request(
            request,
            max_model_len=self.config.max_model_len,
            num_pages=self.cache.total_pages,
            page_size=self._page_size,
        )

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises BadRequest if it can never be served, Overloaded if full."""
        try:
            if request.request_id in self._requests:
                raise BadRequest(f"request id {request.request_id!r} is in use", param="request_id")
            self.check(request)
            if len(self._queue) >= self.config.max_queued:
                raise Overloaded(f"{len(self._queue)} requests are waiting already; try again")
        except (BadRequest, Overloaded):
            self._counters.refused += 1
            raise
        seed = request.sampling.seed
        drawn = self._seeds.getrandbits(63)  # drawn in any case: independent of the others
        state = RequestState(
            request, seed=drawn if seed is None else seed, eos_ids=self.config.eos_ids
        )
        state.queued_at_pass = self._pass_no
        state.queued_at_tokens = self._counters.planned_tokens
        if self._policy.uses_cache:
            self.cache.touch(self._admission.find_match(state))
        if self.tiers is not None:
            self.tiers.queued(state.request_id, self._admission.find_match(state))
        self._requests[request.request_id] = state
        self._queue.add(state, self._view())

    def abort(self, request_id: str) -> OutputChunk | None:
        """End a request now, wherever it stands; None if it has ended already."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, FinishReason.ABORT)

    def serial_of(self, request_id: str) -> int | None:
        """Under which serial a request runs; None if it is queued or unknown."""
        request = self._requests.get(request_id)
        return None if request is None or request.phase is Phase.QUEUED else request.serial

    def abort_all(self, error: str) -> list[OutputChunk]:
        """End every request with ERROR: the worker cannot go on."""
        return [
            self._finish(request, FinishReason.ERROR, error=error)
            for request in list(self._requests.values())
        ]

    def flush(self) -> int:
        """Forget all cached pages; returns how many running requests still hold."""
        return self.cache.flush()

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        return self._counters.snapshot(
            running=len(self._running),
            queued=len(self._queue),
            cache=self.cache.stats(),
            tiers=None if self.tiers is None else self.tiers.stats(),
            remote=None if self.remote is None else self.remote.stats(),
        )

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Plans handed out and not applied yet."""
        return len(self._in_flight)

    @property
    def may_plan_ahead(self) -> bool:
        """Whether to plan the next step while one is in flight.

        Not while it is a long one: beside that, planning takes no time, and who comes meanwhile
        would wait for the next one too.
        """
        return not self._in_flight or not self._turns.last_was_long

    # A step.

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to compute until a step in flight is applied."""
        self._pass_no += 1
        answers = [request for request in self._running if request.phase is Phase.DECODE]
        decodes = self._plan_decodes(answers) if self._turns.decodes_are_due else []
        self._admission.admit(self._view)
        prefills = self._plan_prefills()
        prefill_tokens = sum(row.count for row in prefills)
        if prefill_tokens <= self._slice.fill and not decodes:  # answers hardly lengthen the step
            decodes = self._plan_decodes(answers)
        self._turns.planned(prefill_tokens=prefill_tokens, decodes=bool(decodes))
        rows = self._running.still_running(decodes + prefills)
        if not rows:
            waits = self._in_flight or (self.tiers is not None and self.tiers.busy)
            stuck = self._requests and not waits
            assert not stuck, f"{len(self._requests)} requests, and none of them can go on"
            return None
        return self._make_plan(rows)

    def apply(self, result: StepResult) -> list[OutputChunk]:
        """Take in the result of the oldest plan in flight; returns what callers must be told."""
        plan = self._in_flight.popleft()
        assert plan.step == result.step, f"step {result.step} came before step {plan.step}"
        self._counters.compute_s += result.compute_s
        self._hot_reads.finished(plan.step)
        if self.tiers is not None:
            longest = max(row.count for row in plan.rows)
            seconds = result.compute_s - result.load_wait_s
            self.tiers.observe_step(plan.num_tokens, longest, seconds)
        outcomes = {row.serial: row for row in result.rows}
        chunks = []
        for row in plan.rows:
            request = self._running.get(row.serial)
            if request is None:
                continue  # it ended or was retracted while the step ran: a wasted row
            if row.sample:
                chunks.append(self._take_token(request, row, outcomes[row.serial]))
            else:
                request.num_computed = row.start + row.count
                self._running.commit(request)
        return chunks

    def loads_ended(self, ended: Iterable[LoadEnd]) -> None:
        """Loads have filled their pages, or have failed: then their requests start again."""
        for end in ended:
            request = self._running.loading(end.id)
            if request is None:
                continue  # it has left meanwhile
            if end.ok:
                self._take_loaded(request)
            else:
                request.may_load = False
                self._put_back(request)

    def _take_loaded(self, request: RequestState) -> None:
        loaded = request.load_pages * self._page_size
        if request.counts_load:
            assert request.cached is not None, f"{request.request_id} was never admitted"
            stored = request.storage_pages * self._page_size
            request.cached = replace(request.cached, host=loaded - stored, storage=stored)
            self._counters.host_tokens += loaded - stored
            self._counters.storage_tokens += stored
        request.counts_load = False
        request.load_id = None
        request.num_computed += loaded
        self._running.commit(request)

    def _give_up_load(self, request: RequestState) -> None:
        """What was to be loaded at first admission counts as computed after all."""
        if request.counts_load:
            self._counters.computed_tokens += request.load_pages * self._page_size
            request.counts_load = False

    # Parts of a plan.

    def _plan_decodes(self, answers: list[RequestState]) -> list[RowPlan]:
        """`answers`: those that ran before this step's prefills, in order of admission."""
        return [
            decode_row(request)
            for request in answers
            if request.wants_decode and self._supply.has_page_for_next(request)
        ]

    def _plan_prefills(self) -> list[RowPlan]:
        """A slice; the oldest one's if nobody else finds window pages: it takes those of others."""
        oldest_first = self._turns.is_oldest_ones
        return self._plan_slice(oldest_first) or self._plan_slice(True)

    def _plan_slice(self, oldest_first: bool) -> list[RowPlan]:
        prefills = [request for request in self._running if request.phase is Phase.PREFILL]
        remaining = [request.prefill_end - request.num_planned for request in prefills]
        counts = pack_prefills(remaining, self._slice, oldest_first=oldest_first)
        rows = []
        for request, count in zip(prefills, counts, strict=True):
            granted = self._supply.grant(request, count)
            if granted:
                rows.append(prefill_row(request, granted))
        return rows

    def _make_plan(self, rows: list[RowPlan]) -> StepPlan:
        admitted, table_updates, released = self._running.tables.take_changes()
        step = self._counters.steps
        plan = StepPlan(
            step=step,
            rows=tuple(rows),
            admitted=admitted,
            table_updates=table_updates,
            released=released,
            replicas=self._hot_reads.plan(step, rows),  # first: it frees pages
            freed_pages=self._not_loaded(self.cache.take_freed(), 0),
            freed_window_pages=self._not_loaded(self.cache.take_freed_window(), 1),
            loads=self._running.loads_of(rows),
            remote=IN_PLACE if self.remote is None else self.remote.choose(step, rows),
        )
        self._counters.steps += 1
        self._counters.planned_tokens += plan.num_tokens
        self._in_flight.append(plan)
        return plan

    def _not_loaded(self, freed: PageRefs, component: int) -> PageRefs:
        """For tests: pages to poison, but for those that a load may be writing to by now."""
        if self.tiers is None or not len(freed):
            return freed
        return freed[~np.isin(freed, self.tiers.take_destinations(component))]

    def _view(self) -> PolicyView:
        return PolicyView(
            pass_no=self._pass_no,
            planned_tokens=self._counters.planned_tokens,
            running_key=self._running.most_common_key(),
        )

    # Retraction.

    def _retract(self, request: RequestState) -> None:
        """Back to the queue: committed pages stay in the tree, generated tokens are kept."""
        assert len(self._running) > 1, "a request that runs alone always has room"
        request.retractions += 1
        self._counters.retractions += 1
        self._admission.headroom.on_retraction()
        self._put_back(request)

    def _put_back(self, request: RequestState) -> None:
        request.was_computed = max(request.was_computed, request.num_computed)
        self._give_up_load(request)
        self._running.stop(request, Phase.QUEUED)
        self._queue.put_back(request)

    # Ends.

    def _take_token(self, request: RequestState, row: RowPlan, outcome: RowResult) -> OutputChunk:
        """A sampled token has become known: it may end the request."""
        request.num_pending -= 1
        if outcome.error is not None:  # what this step wrote is not to be trusted: no commit
            return self._finish(request, FinishReason.ERROR, error=outcome.error)
        request.append(outcome.token)
        request.num_computed = row.start + row.count
        self._running.commit(request)
        self._counters.generated_tokens += 1
        is_stop = outcome.token in request.stop_ids and row.output_index >= request.min_tokens
        if is_stop:
            return self._finish(request, FinishReason.STOP, outcome=outcome)
        if request.num_outputs >= request.max_tokens:
            return self._finish(request, FinishReason.LENGTH, outcome=outcome)
        return output_chunk(request, outcome=outcome)

    def _finish(
        self,
        request: RequestState,
        why: FinishReason,
        *,
        outcome: RowResult | None = None,
        error: str | None = None,
    ) -> OutputChunk:
        del self._requests[request.request_id]
        if request.phase is Phase.QUEUED:
            self._queue.remove(request)
            if self.tiers is not None:
                self.tiers.leaves_queue(request.request_id)
            request.phase = Phase.FINISHED
        else:
            self._give_up_load(request)
            self._running.stop(request, Phase.FINISHED)
        self._counters.finished[why] += 1
        return output_chunk(request, outcome=outcome, finish=why, error=error)
