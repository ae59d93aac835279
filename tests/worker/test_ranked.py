"""One worker of several ranks, the other ends of the wires played by the test."""

from __future__ import annotations

import socket
import threading
from collections import deque

import numpy as np
import pytest

from phloem.core.errors import EngineDead, GroupError
from phloem.core.plan import PageTableUpdate, RowInit, RowPlan, RowResult, StepPlan, StepResult
from phloem.core.refs import make_ref
from phloem.core.request import SamplingParams, TokenLogprob
from phloem.worker import RankedWorker, RankHooks, Wire, packed
from phloem.worker.verify import FreePages
from phloem.worker.wire import Cancel, Done, End, Failed, Step

PATIENCE_S = 20.0


def row(number: int, *, sample: bool = True, tokens: bytes | None = None) -> RowPlan:
    return RowPlan(row=number, serial=10 + number, start=5, count=1, tokens=tokens, sample=sample)


def plan(step: int, *rows: RowPlan) -> StepPlan:
    return StepPlan(step=step, rows=rows)


def result(step: int, *tokens: tuple[int, int], error: str | None = None) -> StepResult:
    """(row, token) pairs."""
    rows = [RowResult(row=r, serial=10 + r, token=t, error=error) for r, t in tokens]
    return StepResult(step=step, rows=tuple(rows), compute_s=step / 10)


class Own:
    """The leader's own worker: its results are given by the test."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.cancelled: list[int] = []
        self.outcomes: deque[StepResult | Exception] = deque()
        self.closed = False
        self.broken: BaseException | None = None

    def submit(self, plan: StepPlan, free: FreePages | None) -> None:
        assert free is None, "nobody has asked for it"
        self.plans.append(plan)

    def wait(self, timeout_s: float) -> bool:
        return bool(self.outcomes)

    def collect(self) -> StepResult:
        outcome = self.outcomes.popleft()
        if isinstance(outcome, Exception):
            self.broken = outcome
            raise outcome
        return outcome

    def cancel(self, serial: int) -> None:
        self.cancelled.append(serial)

    def stop(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Rig:
    """A worker of three ranks."""

    def __init__(self, *, patience_s: float = 120.0, **hooks) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.own = Own()
        self.ranks = {rank: Wire(theirs) for rank, (_, theirs) in enumerate(pairs, 1)}
        self.down = {rank: wire.down() for rank, wire in self.ranks.items()}
        self.failed = threading.Event()
        wires = [Wire(ours) for ours, _ in pairs]
        self.worker = RankedWorker(self.own, wires, patience_s=patience_s)
        self.worker.connect(RankHooks(on_failure=self.failed.set, **hooks))

    def report(self, rank: int, message: Done | Failed) -> None:
        self.ranks[rank].send(packed(message))

    def die(self, rank: int) -> None:
        self.ranks[rank].shut()
        self.ranks[rank].close()


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.worker.close()


def test_every_rank_gets_every_plan_whole_and_in_one_message(rig) -> None:
    init = RowInit(
        row=3,
        serial=13,
        sampling=SamplingParams(temperature=0.5, stop=("x",), logit_bias=((1, 2.0),)),
        seed=1 << 63,
        stop_ids=(1, 2),
        tokens=b"\1\0\0\0",
        num_prompt_tokens=1,
    )
    refs = np.array([make_ref(2, 7), make_ref(0, 1)])
    whole = StepPlan(
        step=4,
        rows=(row(3, tokens=b"\1\0\0\0"), row(1)),
        admitted=(init,),
        table_updates=(PageTableUpdate(row=3, first_page=1, refs=refs, component=1),),
        released=(2,),
        freed_pages=refs[:1],
        loads=(9,),
    )
    rig.worker.submit(whole)
    for rank in (1, 2):
        got = next(rig.down[rank])
        assert isinstance(got, Step)
        assert (got.log, got.digest) == (b"", None)
        assert (got.plan.rows, got.plan.admitted) == (whole.rows, whole.admitted)
        assert (got.plan.released, got.plan.loads) == ((2,), (9,))
        assert got.plan.table_updates[0].refs.tolist() == refs.tolist()
        assert got.plan.table_updates[0].component == 1
        assert got.plan.freed_pages.tolist() == refs[:1].tolist()
        assert not len(got.plan.freed_window_pages)
    assert rig.own.plans == [whole]
    assert rig.worker.messages == {1: 1, 2: 1}


def test_the_log_travels_with_the_plan() -> None:
    logs = iter([(b"first", None), (b"", "digest")])
    rig = Rig(log=lambda: next(logs))
    rig.worker.submit(plan(0))
    rig.worker.submit(plan(1))
    assert [(m.log, m.digest) for m in (next(rig.down[2]), next(rig.down[2]))] == [
        (b"first", None),
        (b"", "digest"),
    ]
    rig.worker.close()


def test_results_are_merged_in_the_order_of_the_plan(rig) -> None:
    """Two steps in flight, ranks report them in any order of ranks; nothing comes too early."""
    rig.worker.submit(plan(1, row(2), row(0), row(5, sample=False), row(1)))
    rig.worker.submit(plan(2, row(2)))
    best = RowResult(row=1, serial=11, token=7, logprob=TokenLogprob(7, -0.5, ((7, -0.5),)))
    rig.report(2, Done(StepResult(step=1, rows=(best,))))
    rig.report(2, Done(result(2)))
    rig.own.outcomes.append(result(1, (0, 30)))
    assert not rig.worker.wait(0.01)
    rig.report(1, Done(result(1, (2, 32))))
    assert rig.worker.wait(PATIENCE_S)
    merged = rig.worker.collect()
    assert [(r.row, r.token) for r in merged.rows] == [(2, 32), (0, 30), (1, 7)]
    assert merged.rows[2] == best
    assert merged.compute_s == 0.1
    rig.report(1, Done(result(2)))
    rig.own.outcomes.append(result(2, (2, 99)))
    assert [r.token for r in rig.worker.collect().rows] == [99]


def test_what_was_sampled_counts_where_another_rank_gave_the_step_up(rig) -> None:
    rig.worker.submit(plan(0, row(0), row(1)))
    rig.report(1, Done(result(0, (0, 5))))
    rig.report(2, Done(result(0, (0, -1), (1, -1), error="aborted")))
    rig.own.outcomes.append(result(0, (0, -1), (1, -1), error="aborted"))
    assert [(r.token, r.error) for r in rig.worker.collect().rows] == [(5, None), (-1, "aborted")]


def test_a_row_that_nobody_sampled_is_an_error(rig) -> None:
    rig.worker.submit(plan(0, row(0)))
    for rank in (1, 2):
        rig.report(rank, Done(result(0)))
    rig.own.outcomes.append(result(0))
    with pytest.raises(GroupError, match="row 0 of serial 10"):
        rig.worker.collect()


def test_cancellations_reach_all(rig) -> None:
    rig.worker.cancel(12)
    assert rig.own.cancelled == [12]
    assert [next(rig.down[rank]) for rank in (1, 2)] == [Cancel(12), Cancel(12)]


def test_a_rank_that_fails_is_named_with_its_own_words(rig) -> None:
    """The leader's own worker misses it, another rank complains: who failed comes first."""
    rig.worker.submit(plan(0, row(0)))
    rig.report(1, Failed("rank 2 is gone: waited for step 0", hearsay=True))
    rig.own.outcomes.append(GroupError("rank 2 is gone: waited for step 0", ranks=(2,)))
    threading.Timer(0.05, rig.report, (2, Failed("RuntimeError: out of pages"))).start()
    with pytest.raises(EngineDead, match=r"^rank 2 failed: RuntimeError: out of pages$"):
        rig.worker.collect()
    assert rig.failed.is_set()
    with pytest.raises(EngineDead, match="rank 2 failed"):
        rig.worker.submit(plan(1))


def test_a_step_whose_rank_hangs_ends_when_a_later_one_misses_it(rig) -> None:
    """Rank 1 alone computes step 0, and nobody waits for its layers: its end is waited for by what
    comes behind. Red if that is looked at only after step 0 has come."""
    rig.worker.submit(plan(0, row(0)))
    rig.worker.submit(plan(1, row(0)))
    rig.own.outcomes.append(result(0))
    rig.report(2, Done(result(0)))
    assert not rig.worker.wait(0.01)
    rig.own.broken = GroupError("rank 1 is late: waited for the end of step 0", ranks=(1,))
    assert rig.worker.wait(0.01)
    with pytest.raises(EngineDead, match=r"^rank 1 is late"):
        rig.worker.collect()


def test_a_rank_that_hangs_in_the_last_step_of_all_is_named() -> None:
    """Rank 1 alone computes, no step comes behind. Red if one that moves is given up, however long
    it takes, or if one that stands still is waited for."""
    places, moves = iter(range(1_000_000)), [True]
    rig = Rig(patience_s=0.05, moved=lambda _rank: next(places) if moves[0] else -1)
    rig.worker.submit(plan(7, row(0)))
    rig.own.outcomes.append(result(7))
    rig.report(2, Done(result(7)))
    for _ in range(20):
        assert not rig.worker.wait(0.01)
    moves[0] = False
    while not rig.worker.wait(0.01):
        assert not rig.failed.is_set()
    late = r"^rank 1 failed: it has not ended step 7, and not moved for 0.05 s$"
    with pytest.raises(EngineDead, match=late):
        rig.worker.collect()
    assert rig.failed.is_set()
    rig.worker.close()


def test_a_rank_that_complains_and_leaves_is_not_the_one_that_failed(rig) -> None:
    """Rank 2 hangs: rank 1 has missed it, says so and ends."""
    rig.worker.submit(plan(0, row(0)))
    rig.report(1, Failed("rank 2 is late: waited for step 0", hearsay=True))
    rig.die(1)
    rig.worker.cancel(10)  # what is sent to it now finds nobody
    assert rig.failed.wait(PATIENCE_S)
    rig.worker._readers[0].join(PATIENCE_S)  # it has seen the end of the wire
    rig.own.outcomes.append(GroupError("rank 2 is late: waited for step 0", ranks=(2,)))
    with pytest.raises(EngineDead, match="rank 2 is late"):
        rig.worker.collect()


def test_a_rank_that_dies_while_nothing_runs_is_noticed() -> None:
    rig = Rig(end_of=lambda rank: f"{rank} was shot")
    assert rig.worker.failure() is None
    rig.die(1)
    assert rig.failed.wait(PATIENCE_S)
    assert rig.worker.failure() == "rank 1 failed: 1 was shot"
    rig.worker.close()


def test_a_rank_that_dies_in_a_step_ends_the_wait(rig) -> None:
    rig.worker.submit(plan(0, row(0)))
    rig.own.outcomes.append(result(0, (0, 1)))
    rig.report(2, Done(result(0)))
    rig.die(1)
    assert rig.worker.wait(PATIENCE_S)
    with pytest.raises(EngineDead, match="rank 1 failed: its connection has closed"):
        rig.worker.collect()


def test_a_failure_is_known_before_the_leaders_own_worker_notices(rig) -> None:
    """It waits for a rank that does not move, for two minutes if need be."""
    rig.worker.submit(plan(0, row(0)))
    rig.report(2, Failed("ValueError: no"))
    assert rig.failed.wait(PATIENCE_S)
    assert rig.worker.wait(0.0)
    with pytest.raises(EngineDead, match="rank 2 failed: ValueError: no"):
        rig.worker.collect()


def test_ranks_are_told_of_an_end_in_order(rig) -> None:
    """Red if they cannot tell it from the end of a leader that has been killed."""
    rig.worker.farewell()
    rig.worker.stop()
    assert list(rig.down[1]) == [End()]


def test_close_reaps_between_the_order_and_the_end(rig) -> None:
    """Ranks are told first: red if the leader's own thread is waited for while they still run."""
    seen = []
    hooks = RankHooks(reap=lambda: seen.append((list(rig.down[1]), rig.own.closed)))
    rig.worker.connect(hooks)
    rig.worker.close()
    assert seen == [([], False)]
    assert rig.own.closed
