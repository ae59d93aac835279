"""When the next plan is made: judged by decode steps, and by what planning takes."""

from __future__ import annotations

import pytest

from phloem.core.clock import VirtualClock
from phloem.core.plan import RowPlan, StepPlan, StepResult
from phloem.loop.step_times import StepTimes


def plan(*counts: int) -> StepPlan:
    rows = [
        RowPlan(row=i, serial=i, start=0, count=count, tokens=b"", sample=True)
        for i, count in enumerate(counts)
    ]
    return StepPlan(step=0, rows=tuple(rows))


def run(times: StepTimes, clock: VirtualClock, step: StepPlan, seconds: float) -> None:
    times.submitted(step, 0.0)
    clock.advance(seconds)
    times.collected(StepResult(step=0, rows=(), compute_s=seconds))


def test_the_next_plan_is_there_before_the_step_ends() -> None:
    """Planning takes 2 ms: it begins more than that before nine tenths of the step are over."""
    clock = VirtualClock(5.0)
    times = StepTimes(clock)
    run(times, clock, plan(1, 1), 0.2)
    times.submitted(plan(1, 1), 0.002)
    assert times.plan_at_s() == pytest.approx(5.2 + 0.18 - 2 * 0.002)


def test_only_steps_of_decodes_are_judged_and_the_shortest_counts() -> None:
    clock = VirtualClock()
    times = StepTimes(clock)
    for seconds in (0.2, 0.16, 0.24):
        run(times, clock, plan(1, 1), seconds)
    run(times, clock, plan(1, 40), 0.01)
    times.submitted(plan(1), 0.0)
    assert times.plan_at_s() == pytest.approx(clock.now_s() + 0.9 * 0.16)


def test_before_anything_is_known_plans_are_made_at_once() -> None:
    clock = VirtualClock(3.0)
    times = StepTimes(clock)
    times.submitted(plan(1), 0.0)
    assert times.plan_at_s() == 3.0


def test_short_steps_are_planned_late_only_after_an_answer_has_ended() -> None:
    """Red if steady decoding looked out in every step, or a client that goes on came too late."""
    clock = VirtualClock()
    times = StepTimes(clock)
    for _ in range(3):
        run(times, clock, plan(1, 1), 0.01)
    times.submitted(plan(1, 1), 0.0)
    assert times.plan_at_s() == clock.now_s()
    times.collected(StepResult(step=0, rows=(), compute_s=0.01))
    times.answer_ended()
    times.submitted(plan(1), 0.0)
    assert times.plan_at_s() == pytest.approx(clock.now_s() + 0.009)
    clock.advance(0.1)
    times.collected(StepResult(step=0, rows=(), compute_s=0.01))
    times.submitted(plan(1), 0.0)
    assert times.plan_at_s() == clock.now_s()
