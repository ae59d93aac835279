"""When the step in flight will end, judged by those before it."""

from __future__ import annotations

from collections import deque

from phloem.core.clock import Clock
from phloem.core.plan import StepPlan, StepResult

__all__ = ["StepTimes"]

_LOOK_BACK = 4  # steps
_EARLY = 0.1  # of a step
# Steps so short are planned late only for this long after an answer's end, when its client may go
# on: otherwise whoever comes would wait no more than such a step, and looking out costs 0.1 ms.
_SHORT_S = 0.1
_EXPECTED_S = 0.05


class StepTimes:
    """Follows what is submitted and collected; one step runs after another.

    Only steps of decodes are judged, by the shortest of the last few: they differ little. To judge
    too short is safe (the next step is planned early), too long leaves the worker idle for a
    moment.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._in_flight: deque[bool] = deque()  # does it only decode?
        self._seconds: deque[float] = deque(maxlen=_LOOK_BACK)
        self._began_s = clock.now_s()  # when the first of them did
        self._planning_s = 0.0
        self._expects_until_s = 0.0

    def submitted(self, plan: StepPlan, planning_s: float) -> None:
        """A plan was made and handed over, which took `planning_s`."""
        if not self._in_flight:
            self._began_s = self._clock.now_s()
        self._in_flight.append(plan.num_tokens == len(plan.rows))
        self._planning_s = planning_s

    def collected(self, result: StepResult) -> None:
        """The first step in flight has ended."""
        if self._in_flight.popleft():
            self._seconds.append(result.compute_s)
        self._began_s = self._clock.now_s()

    def answer_ended(self) -> None:
        """Its client may go on soon."""
        self._expects_until_s = self._clock.now_s() + _EXPECTED_S

    def plan_at_s(self) -> float:
        """When to begin planning so that the next plan is there in time."""
        if not self._in_flight or not self._seconds:
            return self._began_s
        shortest_s = min(self._seconds)
        if shortest_s < _SHORT_S and self._began_s >= self._expects_until_s:
            return self._began_s
        return self._began_s + (1 - _EARLY) * shortest_s - 2 * self._planning_s
