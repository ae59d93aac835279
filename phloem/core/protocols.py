"""The protocols by which the front joins the two wings."""

from __future__ import annotations

from typing import Protocol

from phloem.core.plan import StepPlan, StepResult

__all__ = ["Worker"]


class Worker(Protocol):
    """One rank's executor: runs step plans in order, one at a time."""

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan and return at once. At most two plans are in flight."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest plan in flight and return its result.

        An exception raised by the step itself is raised here: the worker is then unusable.
        """
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until `collect` will return at once; False if it will not yet after `timeout_s`."""
        ...

    def cancel(self, serial: int) -> None:
        """Nobody wants the results of this row any more.

        A step whose rows are all cancelled may stop early; its sampled rows then report errors.
        """
        ...

    def close(self) -> None:
        """Finish or drop what is in flight and give back threads and memory."""
        ...
