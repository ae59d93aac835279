"""Replay a trace through the real loop, scheduler and cache.

By default with a worker that computes nothing, one request after another (times ignored); timed,
requests arrive when the trace says, and with a virtual clock no time is spent waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from phloem.cache import HostTier, PrefixCache, WindowConfig
from phloem.cache.placement import make_placement
from phloem.cache.remote_choice import RemoteChooser, RemoteModel
from phloem.core.clock import VirtualClock
from phloem.core.errors import BadRequest, EngineDead
from phloem.core.namespace import make_namespace
from phloem.core.request import GenerateRequest, OutputChunk, SamplingParams
from phloem.core.stats import EngineStats
from phloem.core.transfer import TransferKind
from phloem.kv.sizing import pages_for_tokens
from phloem.loop import EngineLoop
from phloem.sched import Scheduler, SchedulerConfig
from phloem.sim.cost import CostModel, CostWorker
from phloem.sim.traces import TraceRequest, trace_tokens
from phloem.sim.transfers import SimTransfers
from phloem.tiers import TierConfig, TierController
from phloem.tiers.config import is_exclusive

__all__ = [
    "Emit",
    "LoopFactory",
    "Ranks",
    "ReplayReport",
    "ReplayTarget",
    "pages_of",
    "replay",
    "simulated_target",
]

Emit: TypeAlias = Callable[[Sequence[OutputChunk]], None]
LoopFactory: TypeAlias = Callable[[Emit], EngineLoop]

_NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How many ranks own pages, and which one owns which (see `cache.placement`).

    `remote`: by what steps choose how they read remote pages; None: all read them in place.
    """

    count: int = 1
    placement: str = "striped"
    remote: RemoteModel | None = None


ONE_RANK = Ranks()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTarget:
    """What a trace is played on. `make_loop(emit)` builds the loop; its chunks go to `emit`."""

    make_loop: LoopFactory
    vocab_size: int = 32_000  # prompts use ids below it


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What a replay saw. Refused requests count in `requests` and `refused` only."""

    requests: int
    refused: int
    prompt_tokens: int
    cached_tokens: int
    evicted_pages: int
    window_evicted_pages: int  # of sliding-window layers alone
    restarts: int  # requests that began before the end of what other layers had
    host_tokens: int  # of the cached ones: loaded from the host
    written_pages: int  # copied to the host
    loaded_pages: int  # copied back
    full_copy_pages: int  # copied to and fro by a cache that moves every prompt and hit whole
    cached_by_request: tuple[int | None, ...]  # None: refused
    elapsed_s: float  # by the loop's clock

    @property
    def hit_rate(self) -> float:
        """Cached tokens per prompt token."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def simulated_target(
    *,
    num_pages: int,
    ranks: Ranks = ONE_RANK,
    policy: str = "lpm",
    page_size: int = 16,
    cost: CostModel | None = None,
    host_pages: int = 0,
    write_policy: str = "write_through",
    window: WindowConfig | None = None,
) -> ReplayTarget:
    """The real loop, scheduler, cache and tiers over a worker that computes nothing.

    `num_pages` and `window.pages`, given once, are those of each rank.
    """
    if window is not None:
        window = replace(window, pages=window.pages * ranks.count)

    def make_loop(emit: Emit) -> EngineLoop:
        clock = VirtualClock()
        pools = (num_pages,) * ranks.count
        device_pages = sum(make_placement(ranks.placement).pools(pools))
        host = HostTier(pages=host_pages, exclusive=is_exclusive(device_pages, host_pages))
        cache = PrefixCache(
            page_size=page_size,
            num_pages=pools,
            placement=ranks.placement,
            host=host,
            window=window,
        )
        tiers = None
        if host_pages:
            transfers = SimTransfers(clock, num_host_pages=host_pages)
            if window is not None:
                transfers.add_window(num_host_pages=window.host_pages)
            tiers = TierController(cache, transfers, clock, TierConfig(write_policy=write_policy))
        config = SchedulerConfig(
            max_model_len=_NO_LIMIT,
            max_queued=_NO_LIMIT,
            policy=policy,
            max_prefill_tokens=16384,
        )
        worker = CostWorker(clock, cost)
        if tiers is not None:
            worker.gate = transfers
        chooser = None if ranks.remote is None else RemoteChooser(model=ranks.remote)
        return EngineLoop(Scheduler(config, cache, tiers, chooser), worker, clock, emit)

    return ReplayTarget(make_loop=make_loop)


def replay(
    trace: Iterable[TraceRequest],
    *,
    num_pages: int | None = None,
    policy: str = "lpm",
    page_size: int = 16,
    timed: bool = False,
    max_tokens: int | None = 1,
    target: ReplayTarget | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> ReplayReport:
    """Run a trace; answers are greedy.

    `num_pages` None: a pool that never evicts. `max_tokens` None: as many as the trace says.
    `target` replaces the one that these sizes make. `on_progress(done, total)` is called as
    requests end.
    """
    requests = list(trace)
    if target is None:
        if num_pages is None:
            num_pages = pages_of(requests, max_tokens=max_tokens, page_size=page_size)
        target = simulated_target(num_pages=num_pages, policy=policy, page_size=page_size)
    run = _Run(requests, target, max_tokens=max_tokens, on_progress=on_progress)
    return run.by_arrival_times() if timed else run.one_after_another()


def _moved(stats: EngineStats, before: EngineStats, kind: TransferKind) -> int:
    """Pages that went one way between the two snapshots."""

    def total(snapshot: EngineStats) -> int:
        ways = () if snapshot.tiers is None else snapshot.tiers.transfers
        return sum(way.pages_total for way in ways if way.kind == kind.value)

    return total(stats) - total(before)


def _window_evicted(stats: EngineStats) -> int:
    return 0 if stats.cache.window is None else stats.cache.window.evicted_pages_total


def pages_of(trace: Iterable[TraceRequest], *, max_tokens: int | None, page_size: int) -> int:
    """Pages of a pool that never evicts while the trace is played."""
    return max(1, sum(_most_pages(request, max_tokens, page_size) for request in trace))


def _most_pages(request: TraceRequest, max_tokens: int | None, page_size: int) -> int:
    outputs = request.num_output_tokens if max_tokens is None else max_tokens
    return pages_for_tokens(request.num_prompt_tokens + max(1, outputs), page_size)


class _Run:
    """One replay: its loop, and what has come out of it."""

    def __init__(
        self,
        requests: list[TraceRequest],
        target: ReplayTarget,
        *,
        max_tokens: int | None,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._requests = requests
        self._max_tokens = max_tokens
        self._on_progress = on_progress
        self._vocab_size = target.vocab_size
        self._cached: list[int | None] = [None] * len(requests)
        self._refused = 0
        self._done = 0
        self._loop = target.make_loop(self._take)
        self._before = self._loop.stats()
        self._start_s = self._now()

    def one_after_another(self) -> ReplayReport:
        for index in range(len(self._requests)):
            self._add(index)
            while not self._loop.idle:
                self._step()
        return self._report()

    def by_arrival_times(self) -> ReplayReport:
        order = sorted(range(len(self._requests)), key=lambda i: self._requests[i].arrival_s)
        for index in order:
            due_s = self._start_s + self._requests[index].arrival_s
            while self._now() < due_s and not self._loop.idle:
                self._step()
            self._wait_until(due_s)
            self._add(index)
        while not self._loop.idle:
            self._step()
        return self._report()

    def _step(self) -> None:
        self._loop.step()
        if self._loop.dead is not None:
            raise EngineDead(f"the replay stopped: {self._loop.dead}")

    def _now(self) -> float:
        return self._loop.clock.now_s()

    def _wait_until(self, due_s: float) -> None:
        wait_s = due_s - self._now()
        if wait_s <= 0:
            return
        if isinstance(self._loop.clock, VirtualClock):
            self._loop.clock.advance(wait_s)
        else:
            time.sleep(wait_s)

    def _add(self, index: int) -> None:
        trace = self._requests[index]
        outputs = trace.num_output_tokens if self._max_tokens is None else self._max_tokens
        request = GenerateRequest(
            request_id=str(index),
            tokens=trace_tokens(trace, vocab_size=self._vocab_size),
            sampling=SamplingParams(max_tokens=max(1, outputs), temperature=0.0, ignore_eos=True),
            namespace=make_namespace(model="replay"),
            arrival_s=trace.arrival_s,
        )
        try:
            self._loop.add(request)
        except BadRequest:
            self._refused += 1
            self._count_done()

    def _take(self, chunks: Sequence[OutputChunk]) -> None:
        for chunk in chunks:
            if chunk.finish is not None:
                self._cached[int(chunk.request_id)] = chunk.cached.total
                self._count_done()

    def _count_done(self) -> None:
        self._done += 1
        self._on_progress(self._done, len(self._requests))

    def _report(self) -> ReplayReport:
        while self._loop.step():
            pass  # copies to the host that are still under way
        stats, before = self._loop.stats(), self._before
        size = stats.cache.page_size
        served = [
            (r, c) for r, c in zip(self._requests, self._cached, strict=True) if c is not None
        ]
        return ReplayReport(
            requests=len(self._requests),
            refused=self._refused,
            prompt_tokens=sum(request.num_prompt_tokens for request, _ in served),
            cached_tokens=sum(cached for _, cached in served),
            evicted_pages=stats.cache.evicted_pages_total - before.cache.evicted_pages_total,
            window_evicted_pages=_window_evicted(stats) - _window_evicted(before),
            restarts=stats.restarts_total - before.restarts_total,
            host_tokens=stats.cached_tokens_total.host - before.cached_tokens_total.host,
            written_pages=_moved(stats, before, TransferKind.BACKUP_HOST),
            loaded_pages=_moved(stats, before, TransferKind.LOAD_BACK),
            full_copy_pages=sum(
                request.num_prompt_tokens // size + cached // size for request, cached in served
            ),
            cached_by_request=tuple(self._cached),
            elapsed_s=self._now() - self._start_s,
        )
