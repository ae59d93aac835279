"""The worker: a runner, on a thread of its own or inline."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from phloem.core.errors import EngineDead
from phloem.core.plan import StepPlan, StepResult
from phloem.core.refs import PageRef
from phloem.core.remote import LinkRates
from phloem.pools import DevicePool
from phloem.worker.runner import Runner
from phloem.worker.verify import FreePages

__all__ = ["InlineWorker", "TorchWorker"]


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


@dataclass(frozen=True, slots=True)
class _Planned:
    plan: StepPlan
    free: FreePages | None


class InlineWorker:
    """Runs a plan inside `submit`: for tests and audits."""

    def __init__(self, runner: Runner, pools: Sequence[DevicePool]) -> None:
        self._runner, self._pools = runner, tuple(pools)
        self._done: deque[StepResult | _Failed] = deque()
        self.broken: BaseException | None = None  # what the first failed step has raised

    def submit(self, plan: StepPlan, free: FreePages | None = None) -> None:
        """`free`: see `Runner.run`."""
        if self.broken is not None:
            self._done.append(_Failed(self.broken))
            return
        try:
            self._done.append(self._runner.run(plan, free))
        except Exception as error:  # reported by collect, as a thread would
            self.broken = error
            self._done.append(_Failed(error))

    def measure(self) -> LinkRates:
        """See `Runner.measure`."""
        return self._runner.measure()

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002
        return True  # the step ran inside `submit`

    def cancel(self, serial: int) -> None:
        self._runner.cancel(serial)

    def collect(self) -> StepResult:
        assert self._done, "nothing was submitted"
        return _unwrap(self._done.popleft())

    def read_page(self, ref: PageRef, component: int = 0) -> bytes:
        """A copy of a page's bytes, for audits; no plan may be in flight."""
        return self._pools[component].read(ref)

    def stop(self) -> None:
        """Give up the running plan at its next layer. From any thread."""
        self._runner.stop()

    def close(self) -> None:
        self._done.clear()
        self._runner.leave()


class TorchWorker:
    """Runs plans first in, first out, on its own thread.

    Owns the runner (and through it the tables and the pools) until `close`.
    """

    def __init__(self, runner: Runner, pools: Sequence[DevicePool]) -> None:
        self._runner, self._pools = runner, tuple(pools)
        self._plans: queue.SimpleQueue[_Planned | Future[LinkRates] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | _Failed] = queue.SimpleQueue()
        self._next: StepResult | _Failed | None = None  # taken by `wait`, not collected yet
        self._closed = threading.Event()
        # What the first failed step has raised; known before any other rank misses this one.
        self.broken: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="phloem-worker", daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan, free: FreePages | None = None) -> None:
        """`free`: see `Runner.run`."""
        assert not self._closed.is_set(), "the worker is closed"
        self._plans.put(_Planned(plan, free))

    def measure(self) -> LinkRates:
        """See `Runner.measure`; on the thread that will run the plans. Waits for it."""
        future: Future[LinkRates] = Future()
        self._plans.put(future)
        return future.result()

    def wait(self, timeout_s: float) -> bool:
        if self._next is None:
            try:
                self._next = self._results.get(timeout=timeout_s)
            except queue.Empty:
                return False
        return True

    def cancel(self, serial: int) -> None:
        self._runner.cancel(serial)

    def collect(self) -> StepResult:
        outcome = self._results.get() if self._next is None else self._next
        self._next = None
        return _unwrap(outcome)

    def read_page(self, ref: PageRef, component: int = 0) -> bytes:
        """A copy of a page's bytes, for audits; no plan may be in flight."""
        return self._pools[component].read(ref)

    def stop(self) -> None:
        """Give up the running plan at its next layer, and drop the queued ones. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._runner.stop()
            self._plans.put(None)

    def close(self) -> None:
        """`stop`, and join the thread."""
        self.stop()
        self._thread.join()

    def _serve(self) -> None:
        while (planned := self._plans.get()) is not None:
            if isinstance(planned, Future):
                self._measure(planned)
                continue
            if self._closed.is_set():
                self._results.put(_Failed(EngineDead("the worker was closed")))
                continue
            if self.broken is not None:
                self._results.put(_Failed(self.broken))
                continue
            try:
                self._results.put(self._runner.run(planned.plan, planned.free))
            except BaseException as error:  # the thread's entry point: collect raises it
                self.broken = error
                self._results.put(_Failed(error))
                self._runner.leave()
        self._runner.leave()

    def _measure(self, future: Future[LinkRates]) -> None:
        try:
            future.set_result(self._runner.measure())
        except Exception as error:  # raised where it is waited for
            future.set_exception(error)


def _unwrap(outcome: StepResult | _Failed) -> StepResult:
    if isinstance(outcome, _Failed):
        raise outcome.error
    return outcome
