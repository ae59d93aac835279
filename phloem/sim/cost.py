"""A worker that computes nothing: every token is 0, and a step takes as long as a model says."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from phloem.core.clock import VirtualClock
from phloem.core.plan import RowResult, StepPlan, StepResult
from phloem.core.transfer import LayerGate

__all__ = ["CostModel", "CostWorker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a step: step_s + prefill_token_s per prefill token + decode_row_s per decode."""

    step_s: float = 0.005
    prefill_token_s: float = 0.0001
    decode_row_s: float = 0.0005

    def seconds(self, plan: StepPlan) -> float:
        decodes = sum(1 for row in plan.rows if row.count == 1)
        prefill_tokens = plan.num_tokens - decodes
        return self.step_s + self.prefill_token_s * prefill_tokens + self.decode_row_s * decodes


class CostWorker:
    """Implements `core.protocols.Worker`; moves `clock` on as each step is collected."""

    def __init__(self, clock: VirtualClock, cost: CostModel | None = None) -> None:
        self._clock = clock
        self._cost = CostModel() if cost is None else cost
        self._queue: deque[StepPlan] = deque()
        self.gate: LayerGate | None = None

    def submit(self, plan: StepPlan) -> None:
        self._queue.append(plan)

    def collect(self) -> StepResult:
        plan = self._queue.popleft()
        seconds = self._cost.seconds(plan)
        if plan.loads and self.gate is not None:
            self.gate.wait_layer(plan.loads, 0)
        self._clock.advance(seconds)
        rows = tuple(
            RowResult(row=row.row, serial=row.serial, token=0) for row in plan.rows if row.sample
        )
        return StepResult(step=plan.step, rows=rows, compute_s=seconds)

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002
        return True  # a step is computed when it is collected

    def cancel(self, serial: int) -> None:
        """Every step is computed whole."""

    def close(self) -> None:
        self._queue.clear()
