"""What copies of hot pages beside their owners spare, and what they cost.

    replica_travel_roomy    pages that gather_kv moves between 2 ranks with replicas, those that
                            make them included, over those without: 16 recorded agent sessions at
                            their times, pools with room for twice the trace
    replica_travel_full     the same with 512 pages a rank, which are always full: replicas give way
    replica_hits_full       cached tokens there, over those without replicas
    replica_turn_direct     a step of NEW tokens on CACHED ones, all of others' pages replicated,
                            over the same without replicas, less one, where pages are read in place
    replica_turn_gather     the same where pages travel, through memory
    replica_decode_direct   one token on CACHED ones, read in place
    replica_decode_gather   the same where pages travel, through memory

Pages are counted exactly: each once for a rank and a layer, whatever rows read it.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from phloem.bench.cp_engines import random_prompt, write_random_model
from phloem.bench.cp_hits import AGENTS, PAGE_SIZE, SHARDED_PAGES
from phloem.bench.cp_linked import open_pair, row_of
from phloem.bench.report import Result
from phloem.bench.tree import find_trace
from phloem.cache import PrefixCache, ReplicaConfig
from phloem.core.clock import VirtualClock
from phloem.core.plan import PageTableUpdate, ReplicaPlan, RowPlan, StepPlan, StepResult
from phloem.core.refs import PageRefs, make_ref, owners_of
from phloem.core.remote import IN_PLACE, Remote, RemoteWays
from phloem.core.tokens import tokens_to_bytes
from phloem.loop import EngineLoop
from phloem.sched import Scheduler, SchedulerConfig
from phloem.sim import CostWorker, ReplayTarget, TraceRequest, pages_of, read_trace, replay
from phloem.sim.replay import Emit
from phloem.worker import RankedWorker

__all__ = ["Travel", "measure_replicas", "travel"]

RANKS = 2
CONFIG = ReplicaConfig()
GATHER = RemoteWays.all(Remote.GATHER_KV)
NUM_LAYERS, CACHED, NEW, CHUNK = 4, 8192, 64, 2048


class Travel(CostWorker):
    """Computes nothing, and counts the pages that gather_kv would move."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.num_pages = 0  # travelled, each once for a rank that needs it in a step
        self._tables: dict[int, PageRefs] = {}
        self._replicas: list[set[int]] = [set() for _ in range(RANKS)]  # pages, by who has one

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        for update in plan.table_updates:
            old = self._tables.get(update.row, np.empty(0, np.int64))
            kept = old[: update.first_page]
            after = old[update.first_page + len(update.refs) :]
            self._tables[update.row] = np.concatenate([kept, update.refs, after])
        changes = plan.replicas
        if changes is not None:
            for pages, at in ((changes.gone, changes.gone_at), (changes.ready, changes.ready_at)):
                for page, rank in zip(pages.tolist(), owners_of(at).tolist(), strict=True):
                    held = self._replicas[rank]
                    (held.discard if pages is changes.gone else held.add)(page)
            self.num_pages += len(changes.made)
        for rank, held in enumerate(self._replicas):
            self.num_pages += len(self._needed(plan, rank) - held)

    def _needed(self, plan: StepPlan, rank: int) -> set[int]:
        """Others' pages that what `rank` computes sees."""
        needed: set[int] = set()
        for row in plan.rows:
            first, end = row.start // PAGE_SIZE, -(-(row.start + row.count) // PAGE_SIZE)
            table = self._tables[row.row]
            mine = np.flatnonzero(owners_of(table[first:end]) == rank)
            if len(mine):
                seen = table[: first + int(mine[-1]) + 1]
                needed.update(seen[owners_of(seen) != rank].tolist())
        return needed


def travel(
    trace: list[TraceRequest], num_pages: int, config: ReplicaConfig | None
) -> tuple[int, int]:
    """Pages that travel while a trace is played at its times, and cached tokens."""
    workers = []

    def make_loop(emit: Emit) -> EngineLoop:
        clock = VirtualClock()
        cache = PrefixCache(page_size=PAGE_SIZE, num_pages=(num_pages,) * RANKS)
        if config is not None:
            cache.keep_replicas(config)
        workers.append(Travel(clock))
        scheduler = Scheduler(SchedulerConfig(max_model_len=1 << 20), cache)
        return EngineLoop(scheduler, workers[-1], clock, emit)

    target = ReplayTarget(make_loop=make_loop)
    report = replay(trace, page_size=PAGE_SIZE, target=target, timed=True, max_tokens=None)
    return workers[-1].num_pages, report.cached_tokens


def measure_replicas(*, quick: bool = False) -> list[Result]:
    """About three minutes (quick: one)."""
    return [*_counted(), *_timed(rounds=5 if quick else 31)]


def _counted() -> list[Result]:
    names = ("replica_travel_roomy", "replica_travel_full", "replica_hits_full")
    path = find_trace(f"{AGENTS}.jsonl")
    if path is None:
        return [Result(name=name, value=None, unit="ratio") for name in names]
    trace = list(read_trace(path))
    roomy = pages_of(trace, max_tokens=None, page_size=PAGE_SIZE)
    values = []
    for num_pages in (roomy, SHARDED_PAGES):
        (moved, hits), (plainly, plain_hits) = (
            travel(trace, num_pages, config) for config in (CONFIG, None)
        )
        values += [moved / plainly, hits / plain_hits]
    return [
        Result(name=name, value=round(value, 4), unit="ratio")
        for name, value in zip(names, (values[0], values[2], values[3]), strict=True)
    ]


class _Turns:
    """Two ranks and one row of CACHED tokens, striped; rank 1's pages have replicas on rank 0 and
    the other way round, in the slots behind."""

    def __init__(self, worker: RankedWorker) -> None:
        self._worker, self._step, self._rng = worker, 0, random.Random(1)
        count = CACHED // PAGE_SIZE
        pages = [make_ref(page % 2, page // 2) for page in range(count + NEW // PAGE_SIZE)]
        copies = [make_ref(1 - page % 2, count + page // 2) for page in range(count)]
        self._pages = np.array(pages[:count], dtype=np.int64)
        self._copies = np.array(copies, dtype=np.int64)
        prompt = tokens_to_bytes(random_prompt(self._rng, CACHED + NEW))
        update = PageTableUpdate(row=0, first_page=0, refs=np.array(pages, dtype=np.int64))
        self._run(admitted=(row_of(1, prompt),), table_updates=(update,), rows=())
        for low in range(0, CACHED, CHUNK):
            self._run(rows=(self._row(low, CHUNK),))
        self._run(rows=(), replicas=ReplicaPlan(made=self._pages, made_at=self._copies))

    def seconds(self, remote: RemoteWays, count: int, *, replicas: bool) -> float:
        """A step of `count` tokens after the cached ones."""
        ready = ReplicaPlan(ready=self._pages, ready_at=self._copies)
        gone = ReplicaPlan(gone=self._pages, gone_at=self._copies)
        self._run(rows=(), replicas=ready if replicas else gone)
        started = time.perf_counter()
        self._run(rows=(self._row(CACHED, count),), remote=remote)
        return time.perf_counter() - started

    def _row(self, start: int, count: int) -> RowPlan:
        tokens = tokens_to_bytes(random_prompt(self._rng, count))
        return RowPlan(row=0, serial=1, start=start, count=count, tokens=tokens, sample=False)

    def _run(self, **what: object) -> StepResult:
        self._worker.submit(StepPlan(step=self._step, **what))  # type: ignore[arg-type]
        self._step += 1
        return self._worker.collect()


def _timed(rounds: int) -> list[Result]:
    results = []
    with tempfile.TemporaryDirectory(prefix="phloem-cp-") as folder:
        model = write_random_model(Path(folder), num_layers=NUM_LAYERS)
        with _open(model) as turns:
            for name, remote, count in (
                ("replica_turn_direct", IN_PLACE, NEW),
                ("replica_turn_gather", GATHER, NEW),
                ("replica_decode_direct", IN_PLACE, 1),
                ("replica_decode_gather", GATHER, 1),
            ):
                samples = [_pair(turns, remote, count) for _ in range(rounds)]
                results.append(
                    Result(
                        name=name,
                        value=round(statistics.median(samples), 4),
                        unit="ratio",
                        samples=[round(sample, 4) for sample in samples],
                    )
                )
    return results


def _pair(turns: _Turns, remote: RemoteWays, count: int) -> float:
    """With over without, less one; each twice in turn, so that a drift cancels out."""
    order = (True, False, False, True)
    times = [turns.seconds(remote, count, replicas=replicas) for replicas in order]
    return (times[0] + times[3]) / (times[1] + times[2]) - 1


@contextmanager
def _open(model: Path) -> Iterator[_Turns]:
    num_pages = 2 * CACHED // PAGE_SIZE
    with open_pair(model, CACHED + NEW, chunk=CHUNK, num_pages=num_pages) as pair:
        yield _Turns(pair)
