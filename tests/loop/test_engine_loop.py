"""The engine loop: what is submitted when, and what happens if the worker fails."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator

import msgspec
import pytest

from phloem.cache import PrefixCache, check_invariants
from phloem.core.clock import VirtualClock
from phloem.core.errors import EngineDead, Overloaded
from phloem.core.request import FinishReason, GenerateRequest, SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.loop import EngineLoop
from phloem.sched import Scheduler, SchedulerConfig
from phloem.sim import SimStorage
from phloem.tiers import TierConfig
from tests.sched.rig import NAMESPACE, FailingWorker, Rig, prompt_of


class OrderedWorker:
    """Writes down the order of calls around another worker."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.calls: list[str] = []

    def submit(self, plan) -> None:
        self.calls.append(f"submit {plan.step}")
        self.inner.submit(plan)

    def collect(self):
        result = self.inner.collect()
        self.calls.append(f"collect {result.step}")
        return result

    def wait(self, timeout_s):
        return self.inner.wait(timeout_s)

    def cancel(self, serial) -> None:
        self.calls.append(f"cancel {serial}")
        self.inner.cancel(serial)

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        (True, "submit 0, submit 1, collect 0, submit 2, collect 1, collect 2"),
        (False, "submit 0, collect 0, submit 1, collect 1, submit 2, collect 2"),
    ],
)
def test_the_next_step_is_submitted_before_the_last_is_collected(overlap: bool, expected: str):
    """With overlap; without it every step is collected at once."""
    rig = Rig(overlap=overlap)
    worker = OrderedWorker(rig.worker)
    rig.loop._worker = worker
    rig.add("r", [1, 2, 3], max_tokens=3)
    rig.run()
    assert ", ".join(worker.calls) == expected
    rig.check_idle()


class SlowWorker(OrderedWorker):
    """A step ends only after `wait` has been called three times for it."""

    waits = 0

    def wait(self, timeout_s):
        self.waits += 1
        return self.waits % 4 == 0


def test_o35_an_abort_in_a_long_step_frees_its_pages_before_the_step_ends():
    """The driver speaks while the loop waits: add, abort and stats take effect at once."""
    rig = Rig(overlap=False)
    worker = SlowWorker(rig.worker)
    free: list[int] = []

    def on_wait() -> None:
        if "r" not in rig.last:
            assert rig.loop.stats().cache.locked_pages > 0
            rig.loop.abort("r")
            rig.add("later", [5, 6, 7], max_tokens=2)
        free.append(rig.loop.stats().cache.free_pages)

    rig.loop._worker, rig.loop._on_wait = worker, on_wait
    rig.add("r", list(range(20)), max_tokens=50)
    rig.step()
    assert worker.calls == ["submit 0", "cancel 0", "collect 0"]
    assert rig.last["r"].finish is FinishReason.ABORT
    assert free == [rig.cache.total_pages] * 3
    rig.run()
    rig.check_idle()


def test_overlap_wastes_one_row_after_a_stop_and_none_after_a_known_end():
    """The length of an answer is known ahead; a stop id is not."""
    by_length = Rig(overlap=True)
    by_length.add("r", [1, 2, 3], max_tokens=5)
    by_length.run()
    assert len(by_length.worker.plans) == 5
    answer = by_length.answers["r"]
    by_stop = Rig(overlap=True)
    by_stop.add("r", [1, 2, 3], max_tokens=50, stop_token_ids=(answer[4],))
    by_stop.run()
    assert by_stop.answers["r"] == answer
    assert len(by_stop.worker.plans) == 6


def test_futures_are_used_only_with_overlap():
    for overlap in (True, False):
        rig = Rig(overlap=overlap)
        rig.add("r", [1, 2, 3], max_tokens=5)
        rig.run()
        futures = sum(row.tokens is None for plan in rig.worker.plans for row in plan.rows)
        assert futures == (4 if overlap else 0)


def test_an_idle_loop_returns_at_once_and_beats():
    beats: list[int] = []
    rig = Rig()
    rig.loop._beat = lambda: beats.append(1)
    assert rig.loop.step() is False
    assert rig.loop.idle
    assert beats == [1]
    rig.add("r", [1], max_tokens=1)
    assert not rig.loop.idle
    rig.run()
    assert rig.loop.step() is False


@pytest.mark.parametrize("where", ["submit", "collect"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_failing_worker_ends_every_request_with_an_error(where: str, overlap: bool):
    """Queued and running ones alike; the loop is dead, takes nothing more, and holds no page."""
    chunks = []
    cache = PrefixCache(page_size=4, num_pages=(64,))
    config = SchedulerConfig(max_model_len=100, max_running=2, overlap=overlap)
    scheduler = Scheduler(config, cache)
    loop = EngineLoop(scheduler, FailingWorker(3, where), VirtualClock(), chunks.extend)
    for number in range(4):
        loop.add(request(str(number)))
    while loop.step():
        pass
    assert loop.dead is not None
    assert "out of memory" in loop.dead
    ends = [chunk for chunk in chunks if chunk.finish is not None]
    assert sorted(chunk.request_id for chunk in ends) == ["0", "1", "2", "3"]
    assert {chunk.finish for chunk in ends} == {FinishReason.ERROR}
    assert all("out of memory" in (chunk.error or "") for chunk in ends)
    with pytest.raises(EngineDead, match="out of memory"):
        loop.add(request("late"))
    assert loop.step() is False
    check_invariants(cache, idle=True)


def request(name: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        tokens=tokens_to_bytes([7, 8, 9, int(name) if name.isdigit() else 0]),
        sampling=SamplingParams(max_tokens=20),
        namespace=NAMESPACE,
    )


def test_draining_refuses_new_requests_and_finishes_the_old():
    rig = Rig()
    rig.add("r", [1, 2], max_tokens=6)
    rig.step()
    rig.loop.drain()
    with pytest.raises(Overloaded, match="shutting down"):
        rig.add("late", [1], max_tokens=1)
    rig.run()
    assert rig.last["r"].finish is FinishReason.LENGTH
    rig.check_idle()


def test_chunks_of_a_step_are_emitted_together():
    """One call of `emit` a step: one message to the front."""
    rig = Rig()
    batches = []
    take = rig.loop._emit
    rig.loop._emit = lambda chunks: (batches.append(len(chunks)), take(chunks))
    for number in range(5):
        rig.add(str(number), [number, 1, 2], max_tokens=3)
    rig.run()
    assert batches == [5, 5, 5]
    rig.check_idle()


class TimedWorker(OrderedWorker):
    """Steps of `seconds` one after another, on the rig's clock, which moves while it is waited for.

    `comes(now_s)` is called on the way; `ahead_s`: of each plan but the first, how long before the
    end of the step before it was there.
    """

    def __init__(self, rig: Rig, seconds: Iterator[float], comes=lambda now_s: None) -> None:
        super().__init__(rig.worker)
        self.clock, self.seconds, self.comes = rig.clock, seconds, comes
        self.ends: list[float] = []
        self.took: list[float] = []
        self.free_s = 0.0
        self.ahead_s: list[float] = []

    def submit(self, plan) -> None:
        super().submit(plan)
        now_s = self.clock.now_s()
        self.ahead_s += [self.free_s - now_s] if self.free_s else []
        began_s = max(self.free_s, now_s)
        self.took.append(next(self.seconds))
        self.free_s = began_s + self.took[-1]
        self.ends.append(self.free_s)

    def wait(self, timeout_s):
        left_s = self.ends[0] - self.clock.now_s()
        self.clock.advance(max(0.0, min(left_s, timeout_s)))
        self.comes(self.clock.now_s())
        return left_s <= timeout_s

    def collect(self):
        self.clock.advance(max(0.0, self.ends.pop(0) - self.clock.now_s()))
        return msgspec.structs.replace(super().collect(), compute_s=self.took.pop(0))


def test_who_comes_in_the_first_part_of_a_step_is_in_the_next_one():
    """The next plan is made when the step is nearly over; no worker waits for it all the same."""
    rig = Rig(overlap=True)
    steps: list[int] = []

    def comes(now_s: float) -> None:
        if now_s > 1.0 and "late" not in rig.requests:
            steps.append(rig.worker.plans[-1].step)
            rig.add("late", [1, 2], max_tokens=1)

    worker = TimedWorker(rig, itertools.repeat(0.2), comes)
    rig.loop._worker = worker
    rig.add("talks", [1, 2, 3], max_tokens=30)
    rig.run()
    first = next(plan.step for plan in rig.worker.plans if len(plan.rows) == 2)
    assert first == steps[0] + 1
    assert all(0 < ahead_s < 0.04 for ahead_s in worker.ahead_s[5:]), worker.ahead_s
    rig.check_idle()


@pytest.mark.parametrize("seed", range(3))
def test_steps_that_differ_are_planned_before_the_one_before_ends(seed: int):
    """A step is expected to last as long as the shortest of the last ones: it hardly waits."""
    rng, rig = random.Random(seed), Rig(overlap=True)
    worker = TimedWorker(rig, (rng.uniform(0.18, 0.24) for _ in itertools.count()))
    rig.loop._worker = worker
    rig.add("talks", [1, 2, 3], max_tokens=200)
    rig.run()
    assert sum(ahead_s <= 0 for ahead_s in worker.ahead_s) < 0.05 * len(worker.ahead_s)
    assert statistics.mean(worker.ahead_s) < 0.08
    rig.check_idle()


def test_what_storage_has_is_read_while_a_long_step_runs():
    """Asking and reading in parts are several transfers, each begun when the one before ends."""
    rng, storage = random.Random(7), SimStorage()
    wanted = prompt_of(rng, 400)

    def start() -> Rig:
        config = TierConfig(prefetch_policy="wait_complete")
        return Rig(page_size=4, num_pages=300, host_pages=400, storage=storage, tiers=config)

    before = start()
    before.add("first", wanted, max_tokens=1)
    before.run()
    rig = start()

    def comes(now_s: float) -> None:
        if now_s > 0.1 and "again" not in rig.requests:
            rig.add("again", wanted, max_tokens=1)

    worker = TimedWorker(rig, itertools.repeat(1.0), comes)
    rig.loop._worker = worker
    rig.add("long", prompt_of(rng, 100), max_tokens=4)
    while len(worker.calls) < 3:
        rig.step()
    assert "again" in rig.requests
    assert rig.clock.now_s() < 1.5
    read = {one.kind: one.pages_total for one in rig.loop.stats().tiers.transfers}
    assert read["prefetch"] == 99
    rig.run()
    assert rig.last["again"].cached.storage == 396
    rig.check_idle()
