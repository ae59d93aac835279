"""The loop of one rank.

    plan k+1 -> submit k+1 -> collect k -> apply k -> emit        (overlap)
    plan k   -> submit k   -> collect k -> apply k -> emit        (no overlap, or k is long)

Plan k+1 is made as late as it may be: who comes while k runs is in it, and does not see the pages
that it will reuse given to somebody else first. A client that goes on talking asks a few
milliseconds after its answer has ended.

One thread calls everything here. The loop never waits when it has nothing to do: `step` returns
False, and whoever drives it waits for the next request. While it waits for the worker it calls
`on_wait` now and then, which may add, abort, flush and ask for stats: a client that goes away in a
step of a minute has its pages freed long before the step ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from phloem.core.clock import Clock
from phloem.core.errors import EngineDead, Overloaded
from phloem.core.plan import StepResult
from phloem.core.protocols import Worker
from phloem.core.request import GenerateRequest, OutputChunk
from phloem.core.stats import EngineStats
from phloem.loop.step_times import StepTimes
from phloem.sched import Scheduler
from phloem.tiers import TierController

__all__ = ["EngineLoop"]

logger = logging.getLogger(__name__)

# The longest that a pass without a step waits for a transfer: requests arrive meanwhile.
TIER_WAIT_S = 0.002

Emit = Callable[[Sequence[OutputChunk]], None]

WAIT_S = 0.02  # between two calls of `on_wait` in a long step


def _nothing() -> None:
    """Nobody watches, nobody has anything to say."""


class EngineLoop:
    """Drives a scheduler and a worker; hands `emit` all chunks of a step at once.

    `beat` is called once a pass, for a heartbeat. After the worker has failed, `dead` tells why,
    every request has ended with ERROR, and `add` raises EngineDead.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        clock: Clock,
        emit: Emit,
        beat: Callable[[], None] = _nothing,
        on_wait: Callable[[], None] = _nothing,
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.dead: str | None = None
        self._worker = worker
        self._tiers = scheduler.tiers
        self._emit = emit
        self._beat = beat
        self._on_wait = on_wait
        self._depth = 1 if scheduler.config.overlap else 0
        self._draining = False
        self._times = StepTimes(clock)

    @property
    def idle(self) -> bool:
        """No request is queued or running, and no step is in flight."""
        return self.scheduler.num_unfinished == 0 and self.scheduler.num_in_flight == 0

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises BadRequest, Overloaded (full or draining) or EngineDead."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self._draining:
            raise Overloaded("the engine is shutting down and takes no new requests")
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request now; nothing happens if it has ended already."""
        serial = self.scheduler.serial_of(request_id)
        chunk = self.scheduler.abort(request_id)
        if serial is not None:
            self._worker.cancel(serial)
        if chunk is not None:
            self._emit([chunk])

    def drain(self) -> None:
        """Refuse new requests from now on; keep calling `step` until `idle`."""
        self._draining = True

    def flush(self) -> int:
        """Forget all cached pages; returns how many running requests still hold."""
        return self.scheduler.flush()

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        return self.scheduler.stats()

    def step(self) -> bool:
        """One pass; False if there was nothing to do and nothing is in flight."""
        self._beat()
        if self.dead is not None:
            return False
        plan = None
        if self.scheduler.may_plan_ahead:
            self._wait_for_arrivals()
            started_s = self.clock.now_s()
            plan = self.scheduler.plan()
        waiting = self.scheduler.num_in_flight
        result = None
        try:
            if plan is not None:
                self._worker.submit(plan)
                self._times.submitted(plan, self.clock.now_s() - started_s)
        except Exception as error:  # whatever it was: the worker is unusable now
            return self._die(error)
        if waiting > self._depth or (waiting and plan is None):
            while not self._worker.wait(WAIT_S):
                self._look_around()
            try:
                result = self._worker.collect()
            except Exception as error:  # whatever the step raised: the worker is unusable now
                return self._die(error)
            self._times.collected(result)
        busy = waiting > 0
        if self._tiers is not None:
            busy |= self._look_at_tiers(self._tiers, result, idle=not waiting)
        if result is not None:
            self._take(result)
        return busy

    def _take(self, result: StepResult) -> None:
        chunks = self.scheduler.apply(result)
        if chunks:
            self._emit(chunks)
        if any(chunk.finish is not None for chunk in chunks):
            self._times.answer_ended()

    def _wait_for_arrivals(self) -> None:
        """While a step is in flight: until it is time for the next plan."""
        at_s = self._times.plan_at_s()
        while self.scheduler.num_in_flight:
            left_s = at_s - self.clock.now_s()
            if left_s <= 0:
                return
            ended = self._worker.wait(min(left_s, WAIT_S))
            self._look_around()
            if ended:
                return

    def _look_around(self) -> None:
        """While a step runs: who has come or gone, and which transfers are over and lead to more.

        What storage has of a prompt comes in several reads, and a step may last a second.
        """
        self._on_wait()
        if self._tiers is not None and self._tiers.busy:
            self.scheduler.loads_ended(self._tiers.poll())

    def _look_at_tiers(
        self, tiers: TierController, result: StepResult | None, *, idle: bool
    ) -> bool:
        """Once a pass, before the step's result is taken in: rows of failed loads are void.

        Returns whether something moved, or moves.
        """
        busy = tiers.busy
        if result is not None:
            tiers.step_finished(result.step)
        elif idle and busy:
            tiers.wait(TIER_WAIT_S)
        self.scheduler.loads_ended(tiers.poll())
        return busy or tiers.busy

    def die(self, reason: str) -> None:
        """The worker is dead although no step has failed: every request ends with an error."""
        if self.dead is None:
            self._die(EngineDead(reason))

    def run_until_idle(self) -> None:
        """Step until every request has ended (offline use and tests)."""
        while self.step():
            pass

    def _die(self, error: Exception) -> bool:
        known = isinstance(error, EngineDead)
        what = str(error) if known else f"{type(error).__name__}: {error}"
        self.dead = f"the worker failed: {what}"
        logger.error(self.dead, exc_info=None if known else error)
        self._emit(self.scheduler.abort_all(self.dead))
        return False
