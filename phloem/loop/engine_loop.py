"""The loop of one rank.

    plan k+1 -> submit k+1 -> collect k -> apply k -> emit        (overlap: depth 1)
    plan k   -> submit k   -> collect k -> apply k -> emit        (no overlap: depth 0)

One thread calls everything here. The loop never waits when it has nothing to do: `step` returns
False, and whoever drives it waits for the next request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from phloem.core.clock import Clock
from phloem.core.errors import EngineDead, Overloaded
from phloem.core.protocols import Worker
from phloem.core.request import GenerateRequest, OutputChunk
from phloem.core.stats import EngineStats
from phloem.sched import Scheduler

__all__ = ["EngineLoop"]

logger = logging.getLogger(__name__)

Emit = Callable[[Sequence[OutputChunk]], None]


def _no_beat() -> None:
    """Nobody watches."""


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
        beat: Callable[[], None] = _no_beat,
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.dead: str | None = None
        self._worker = worker
        self._emit = emit
        self._beat = beat
        self._depth = 1 if scheduler.config.overlap else 0
        self._draining = False

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
        chunk = self.scheduler.abort(request_id)
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
        plan = self.scheduler.plan()
        waiting = self.scheduler.num_in_flight
        result = None
        try:
            if plan is not None:
                self._worker.submit(plan)
            if waiting > self._depth or (waiting and plan is None):
                result = self._worker.collect()
        except Exception as error:  # whatever the step raised: the worker is unusable now
            logger.exception("the worker failed")
            self._die(f"the worker failed: {type(error).__name__}: {error}")
            return False
        if result is not None and (chunks := self.scheduler.apply(result)):
            self._emit(chunks)
        return waiting > 0

    def run_until_idle(self) -> None:
        """Step until every request has ended (offline use and tests)."""
        while self.step():
            pass

    def _die(self, why: str) -> None:
        self.dead = why
        self._emit(self.scheduler.abort_all(why))
