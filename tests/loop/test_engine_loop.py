"""The engine loop: what is submitted when, and what happens if the worker fails."""

from __future__ import annotations

import pytest

from phloem.cache import PrefixCache, check_invariants
from phloem.core.clock import VirtualClock
from phloem.core.errors import EngineDead, Overloaded
from phloem.core.request import FinishReason, GenerateRequest, SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.loop import EngineLoop
from phloem.sched import Scheduler, SchedulerConfig
from tests.sched.rig import NAMESPACE, FailingWorker, Rig


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
