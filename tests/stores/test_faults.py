"""Faults of a backend: never a wrong page, never a late answer, never a lost buffer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from phloem.core.clock import VirtualClock
from phloem.core.store import Op, Span, Status, Verb
from phloem.stores import Backend
from phloem.stores.adapters.memory import MemoryBackend
from phloem.stores.adapters.segment import SegmentBackend
from phloem.stores.backend import Item
from phloem.stores.faulty import Fault, FaultyBackend
from phloem.stores.threaded import ThreadedStore
from tests.stores.rig import MISS, OK, PATIENCE_S, Rig, faulty_rig, key_of, make_rig

Maker = Callable[[], Backend]


@pytest.fixture(params=["memory", "segment"])
def inner(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "memory":
        return MemoryBackend(8 << 20)
    return SegmentBackend(str(tmp_path / "store"), 8 << 20)


@pytest.mark.parametrize("seed", range(6))
def test_no_mix_of_faults_serves_a_wrong_page_or_loses_a_buffer(inner: Backend, seed: int) -> None:
    """Random faults of all kinds but hangs; when they end, the store is as good as new."""
    draw = random.Random(seed)
    rig, faulty = faulty_rig(inner, seed=seed)
    rates = {f: 0.12 for f in Fault if f not in (Fault.NONE, Fault.HANG)}
    with rig:
        faulty.set_rates(rates)
        served = 0
        for _ in range(150):
            names = [draw.randrange(40) for _ in range(draw.randrange(1, 9))]
            rig.put(names, 6000)
            served += rig.get(names, 6000).count(OK)
        assert served > 100
        assert set(faulty.counters) >= set(rates)
        faulty.set_rates({})
        names = [f"after-{i}" for i in range(20)]
        assert rig.put(names, 6000) == (OK,) * 20
        assert rig.get(names, 6000) == (OK,) * 20
        stats = rig.store.stats()
        assert (stats.in_flight, stats.held_spans) == (0, 0)


@pytest.mark.parametrize("verb", [Verb.PUT, Verb.GET])
def test_a_flipped_bit_is_corrupt_then_a_miss_then_can_be_put_again(
    inner: Backend, verb: Verb
) -> None:
    """Nothing that was found corrupt is offered a second time."""
    rig, faulty = faulty_rig(inner)
    with rig:
        faulty.script(verb, Fault.CORRUPT)
        rig.put(["a", "b"], 5000)
        assert rig.get(["a", "b"], 5000) == (Status.CORRUPT, OK)
        assert rig.probe(["a", "b"]) == (MISS, OK)
        assert rig.get(["a"], 5000) == (MISS,)
        assert rig.put(["a"], 5000) == (OK,)
        assert rig.get(["a"], 5000) == (OK,)


def test_half_a_batch_has_a_status_for_each_key(inner: Backend) -> None:
    rig, faulty = faulty_rig(inner)
    with rig:
        faulty.script(Verb.PUT, Fault.HALF)
        assert rig.put(list("abcd"), 4096) == (OK, OK, Status.ERROR, Status.ERROR)
        assert rig.probe(list("abcd")) == (OK, OK, MISS, MISS)
        faulty.script(Verb.GET, Fault.HALF)
        assert rig.get(["a", "b"], 4096) == (OK, Status.ERROR)
        assert rig.get(["a", "b"], 4096) == (OK, OK)


def test_o20_a_put_that_failed_is_not_visible(inner: Backend) -> None:
    rig, faulty = faulty_rig(inner)
    with rig:
        faulty.script(Verb.PUT, Fault.ERROR, Fault.DROP)
        assert rig.put(["a"], 4096) == (Status.ERROR,)
        assert rig.get(["a"], 4096) == (MISS,)
        assert rig.put(["a"], 4096) == (OK,)  # it lies: dropped
        assert rig.get(["a"], 4096) == (MISS,)


def running(rig: Rig, faulty: FaultyBackend, op: Op, within_s: float) -> int:
    """Submit an op that hangs, and wait until a thread hangs in it."""
    before = faulty.counters[Fault.HANG]
    faulty.script(op.verb, Fault.HANG)
    ticket = rig.submit(op, within_s)
    rig.until(lambda: faulty.counters[Fault.HANG] > before, step_s=0.0005)
    return ticket


def test_a_hung_get_is_answered_at_its_deadline_and_its_buffer_held(inner: Backend) -> None:
    clock = VirtualClock()
    rig, faulty = faulty_rig(inner, clock=clock)
    with rig:
        rig.put(["a", "b"], 4096)
        op = rig.get_op(["a", "b"], 4096)
        ticket = running(rig, faulty, op, within_s=1.0)
        clock.advance(0.999)
        rig.pump()
        assert ticket not in rig.answers
        clock.advance(0.001)
        rig.pump()
        done = rig.answers[ticket]
        assert done.statuses == (Status.TIMEOUT,) * 2
        assert done.held == (0, 1)
        assert rig.store.stats().held_spans == 2
        assert rig.run(op) == (Status.BUSY,) * 2, "a quarantined buffer was used"
        assert rig.get(["b"], 4096, base=8192) == (OK,), "one hung call stopped the others"
        faulty.release()
        rig.until(lambda: ticket in rig.released)
        assert rig.store.stats().held_spans == 0
        assert rig.get(["a", "b"], 4096) == (OK, OK)


def test_a_put_that_succeeds_after_its_deadline_is_withdrawn(inner: Backend) -> None:
    clock = VirtualClock()
    rig, faulty = faulty_rig(inner, clock=clock)
    with rig:
        ticket = running(rig, faulty, rig.put_op(["a"], 4096), within_s=1.0)
        clock.advance(1.0)
        assert rig.answer(ticket).statuses == (Status.TIMEOUT,)
        faulty.release()
        rig.until(lambda: ticket in rig.released)
        assert rig.probe(["a"]) == (MISS,)


class _Waiting(MemoryBackend):
    """A put waits until it may; then it is done."""

    def __init__(self) -> None:
        super().__init__(8 << 20)
        self.begun, self.may, self.done = (threading.Event() for _ in range(3))

    def put(self, items: Sequence[Item]) -> list[Status]:
        self.begun.set()
        self.may.wait(PATIENCE_S)
        statuses = super().put(items)
        self.done.set()
        return statuses


class _Slow(VirtualClock):
    """Who looks at it is kept until a put has ended."""

    puts: _Waiting | None = None

    def now_s(self) -> float:
        if self.puts is not None:
            puts, self.puts = self.puts, None
            puts.may.set()
            puts.done.wait(PATIENCE_S)
            time.sleep(0.05)  # its thread goes as far as it can
        return super().now_s()


def test_a_put_that_ends_while_it_is_being_answered_timeout_is_withdrawn_too() -> None:
    backend, clock = _Waiting(), _Slow()
    with Rig(ThreadedStore(backend, clock, num_threads=1), clock) as rig:
        ticket = rig.submit(rig.put_op(["a"], 4096), 1.0)
        backend.begun.wait(PATIENCE_S)
        clock.advance(1.0)
        clock.puts = backend
        assert rig.answer(ticket).statuses == (Status.TIMEOUT,)
        rig.until(lambda: ticket in rig.released)
        assert rig.probe(["a"]) == (MISS,)


def test_what_waits_behind_a_hung_backend_expires_with_free_buffers(inner: Backend) -> None:
    """All threads hang: queued calls time out too, but nothing is held for them."""
    clock = VirtualClock()
    rig, faulty = faulty_rig(inner, clock=clock, num_threads=1)
    with rig:
        first = running(rig, faulty, rig.put_op(["a"], 4096), within_s=5.0)
        second = rig.submit(rig.put_op(["b"], 4096, base=4096), 1.0)
        clock.advance(1.0)
        rig.pump()
        assert rig.answers[second].statuses == (Status.TIMEOUT,)
        assert rig.answers[second].held == ()
        assert first not in rig.answers
        faulty.release()
        assert rig.answer(first).statuses == (OK,)
        assert rig.probe(["a", "b"]) == (OK, MISS)


def test_a_spare_thread_takes_the_place_of_a_stuck_one(inner: Backend) -> None:
    """The only thread hangs past its deadline: the store still works; then one thread is left."""
    clock = VirtualClock()
    rig, faulty = faulty_rig(inner, clock=clock, num_threads=1)
    with rig:
        ticket = running(rig, faulty, rig.put_op(["a"], 4096), within_s=1.0)
        clock.advance(1.0)
        rig.answer(ticket)
        assert rig.put(["b"], 4096, base=8192) == (OK,)
        assert rig.get(["b"], 4096, base=8192) == (OK,)
        faulty.release()
        rig.until(lambda: ticket in rig.released)
        assert rig.get(["b"], 4096) == (OK,)


def test_cancel_answers_now_and_keeps_what_is_finished(inner: Backend) -> None:
    """Three parts on one thread: the first is done, the second hangs, the third waits."""
    clock = VirtualClock()
    rig, faulty = faulty_rig(inner, clock=clock, num_threads=1)
    length = 400_000
    with rig:
        rig.put(["a"], length)
        spans = (*rig.spans([length, 3 << 20]), Span(0, 0, 3 << 20), Span(0, 0, 3 << 20))
        op = Op(verb=Verb.GET, keys=tuple(map(key_of, ["a", "x", "y", "z"])), spans=spans)
        faulty.script(Verb.GET, Fault.NONE, Fault.HANG)
        ticket = rig.submit(op, 5.0)
        rig.until(lambda: faulty.counters[Fault.HANG] == 1, step_s=0.0005)
        rig.store.cancel(ticket)
        rig.pump()
        done = rig.answers[ticket]
        assert done.statuses == (OK, MISS, Status.CANCELLED, Status.CANCELLED)
        assert done.held == (2,)
        rig.store.cancel(ticket)
        rig.store.cancel(12_345)
        faulty.release()
        rig.until(lambda: ticket in rig.released)


def test_o21_a_thousand_broken_off_calls_leave_no_buffer_thread_or_ticket(inner: Backend) -> None:
    clock = VirtualClock()
    rig, faulty = faulty_rig(inner, clock=clock)
    draw = random.Random(3)
    with rig:
        rig.put(["a", "b"], 4096)
        for _ in range(1000):
            op = rig.get_op(["a", "b"], 4096)
            if draw.random() < 0.2:
                ticket = running(rig, faulty, op, within_s=1.0)
            else:
                ticket = rig.submit(op, 1.0)
            if draw.random() < 0.5:
                rig.store.cancel(ticket)
            else:
                clock.advance(1.0)
            done = rig.answer(ticket)
            rig.check_content(["a", "b"], op, done.statuses)
            faulty.release()
            if done.held:
                rig.until(lambda t=ticket: t in rig.released)
        stats = rig.store.stats()
        assert (stats.in_flight, stats.held_spans) == (0, 0)
        assert rig.get(["a", "b"], 4096) == (OK, OK)


def test_close_does_not_wait_for_a_hung_backend(inner: Backend) -> None:
    clock = VirtualClock()
    rig, faulty = faulty_rig(inner, clock=clock)
    ticket = running(rig, faulty, rig.put_op(["a"], 4096), within_s=5.0)
    rig.store.close(clock.now_s())
    rig.pump()
    assert rig.answers[ticket].statuses == (Status.DOWN,)
    assert rig.answers[ticket].held == (0,)
    faulty.release()
    rig.until(lambda: ticket in rig.released)


def test_breaker_opens_refuses_at_once_and_closes_by_itself(inner: Backend) -> None:
    clock = VirtualClock()
    faulty = FaultyBackend(inner)
    with make_rig(faulty, clock=clock) as rig:
        rig.put(["a"], 4096)
        for _ in range(4):
            ticket = running(rig, faulty, rig.get_op(["a"], 4096), within_s=0.1)
            clock.advance(0.1)
            assert rig.answer(ticket).statuses == (Status.TIMEOUT,)
            faulty.release()
            rig.until(lambda t=ticket: t in rig.released)
            clock.advance(6.0)  # past the negative cache
        assert not rig.store.stats().healthy
        faulty.script(Verb.PROBE, Fault.ERROR)
        rig.pump()  # sends the probe, which fails
        ticket = rig.submit(rig.get_op(["a"], 4096))
        rig.pump()
        assert rig.answers[ticket].statuses == (Status.DOWN,), "a call waited for a dead backend"
        rig.until(lambda: faulty.counters[Fault.ERROR] == 1)
        clock.advance(0.5)
        rig.pump(0.01)
        assert not rig.store.stats().healthy, "the pause did not grow after a failed probe"
        clock.advance(0.6)
        rig.until(lambda: rig.store.stats().healthy)
        assert rig.get(["a"], 4096) == (OK,)
        assert rig.store.stats().detail("keys_refused_while_down") == 1


def test_a_key_that_failed_is_not_asked_for_again_at_once(inner: Backend) -> None:
    clock = VirtualClock()
    faulty = FaultyBackend(inner)
    with make_rig(faulty, clock=clock) as rig:
        rig.put(["a", "b"], 4096)
        faulty.script(Verb.GET, Fault.ERROR)
        assert rig.get(["a"], 4096) == (Status.ERROR,)
        calls = sum(faulty.counters.values())
        assert rig.get(["a"], 4096) == (MISS,)
        assert rig.probe(["a"]) == (MISS,)
        assert sum(faulty.counters.values()) == calls
        assert rig.get(["a", "b"], 4096) == (MISS, OK), "its neighbours are asked for"
        clock.advance(5.0)
        assert rig.get(["a"], 4096) == (OK,)
        faulty.script(Verb.GET, Fault.ERROR)
        rig.get(["b"], 4096)
        rig.put(["b"], 4096)
        assert rig.get(["b"], 4096) == (OK,), "a put makes a key worth asking for"


def test_a_wrong_answer_of_another_key_is_caught_by_the_seal() -> None:
    """O-16 at the border of a backend: equal keys, or an index that mixes them up."""
    memory = MemoryBackend(1 << 20)
    with make_rig(memory) as rig:
        rig.put(["a", "b"], 4096)
        objects = memory._objects
        objects[key_of("a")], objects[key_of("b")] = objects[key_of("b")], objects[key_of("a")]
        assert rig.get(["a", "b"], 4096) == (Status.CORRUPT, Status.CORRUPT)
