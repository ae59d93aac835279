"""One worker of several ranks: every plan goes to all of them, one result comes back.

submit(plan) --+--> rank 1 ... N-1   one record each: the plan and the log since the last one
               `--> rank 0           the leader's own worker
collect() <------- all results of the step, merged in the order of the plan's rows
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phloem.core.errors import EngineDead, GroupError
from phloem.core.plan import RowPlan, RowResult, StepPlan, StepResult
from phloem.core.refs import PageRef
from phloem.core.remote import LinkRates
from phloem.worker.peers import PATIENCE_S
from phloem.worker.torch_worker import InlineWorker, TorchWorker
from phloem.worker.verify import FreePages
from phloem.worker.wire import (
    Cancel,
    Done,
    End,
    Load,
    Loaded,
    Measure,
    Step,
    Swap,
    Up,
    Wire,
    packed,
)

__all__ = ["Log", "RankHooks", "RankedWorker", "merged"]

logger = logging.getLogger(__name__)

# Who is to blame is known at once where the rank can say so itself; so long it may take.
_BLAME_S = 2.0
# Who waits for the end of a step looks so often whether the ranks that are late move at all.
_LOOK_S = 1.0
# A rank that waits for a hung one stands still as well: it says so before it is taken for hung.
_HUNG_S = PATIENCE_S + 10.0


def _no_log() -> tuple[bytes, str | None]:
    return b"", None


def _unnoticed() -> None:
    """Nobody waits for it."""


def _gone(_rank: int) -> str:
    return "its connection has closed"


def _unseen(_rank: int) -> object:
    """Nobody can tell how far it is."""
    return None


Log = Callable[[], tuple[bytes, str | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHooks:
    """What joins the ranks with the rest.

    `log`: the commands since its last call, and the digest of the state after them where it is time
    to compare. `free`: free pages by pool after these commands, which all ranks compare before the
    step; None: they do not. `on_failure`: called from any thread when a rank has failed, also where
    no step is in flight. `end_of(rank)`: how a rank that is gone came to its end. `moved(rank)`:
    differs from what it was as long as the rank goes on. `reap`: called once all have been told to
    end; no rank lives on when it returns.
    """

    log: Log = _no_log
    free: Callable[[], dict[str, int]] | None = None
    on_failure: Callable[[], None] = _unnoticed
    end_of: Callable[[int], str] = _gone
    moved: Callable[[int], object] = _unseen
    reap: Callable[[], None] = _unnoticed


class RankedWorker:
    """A `Worker`. Owns the leader's own worker and the wires; `wires[i]` leads to rank i + 1."""

    def __init__(
        self,
        own: TorchWorker | InlineWorker,
        wires: Sequence[Wire],
        hooks: RankHooks | None = None,
        *,
        patience_s: float = _HUNG_S,
    ) -> None:
        """`patience_s`: a rank has hung that neither moves nor reports for so long."""
        self._own, self._patience_s = own, patience_s
        self._wires = {rank: wire for rank, wire in enumerate(wires, 1)}
        self._hooks = hooks or RankHooks()
        self._plans: deque[StepPlan] = deque()  # in flight
        self._changed = threading.Condition()
        # All below: under _changed.
        self._done: dict[int, deque[StepResult]] = {rank: deque() for rank in self._wires}
        self._failures: dict[int, str] = {}  # what is wrong with a rank
        self._hearsay: dict[int, str] = {}  # what a rank says of others; then it leaves
        self._loaded: dict[int, str | None] = {}  # errors of those that have answered `Load`
        self._closing = False
        self._since: dict[int, tuple[object, float]] = {}  # where a rank stands, and since when
        self._readers = [
            threading.Thread(
                target=self._read, args=pair, name=f"phloem-from{pair[0]}", daemon=True
            )
            for pair in self._wires.items()
        ]
        for reader in self._readers:
            reader.start()

    def failure(self) -> str | None:
        """Why no step can be run any more; None while all ranks are well.

        Waits a moment for the rank that is to blame, if only others have complained of it.
        """
        with self._changed:
            return self._verdict() if self._is_broken() else None

    def _verdict(self) -> str:
        """Under _changed."""
        own = self._own.broken
        if own is not None and not isinstance(own, GroupError):  # it is this rank that others miss
            logger.error("rank 0 failed", exc_info=own)
            return f"rank 0 failed: {type(own).__name__}: {own}"
        return self._blame([] if own is None else [str(own)])

    def _blame(self, missed: Sequence[str]) -> str:
        """Under _changed: who it was. `missed`: what this rank says of others, who left it alone.

        A rank that fails leaves its groups before it says why: that may be on its way still.
        """
        self._changed.wait_for(lambda: bool(self._failures), _BLAME_S)
        return next(iter((*self._failures.values(), *missed, *self._hearsay.values())))

    def _left_alone(self, missed: str) -> EngineDead:
        """What to raise where this rank's own part failed because of another one."""
        with self._changed:
            return EngineDead(self._blame([missed]))

    @property
    def messages(self) -> Mapping[int, int]:
        """How many messages each rank has been sent."""
        return {rank: wire.sent for rank, wire in self._wires.items()}

    def measure(self) -> LinkRates:
        """What ranks and link do, before the first plan. Raises EngineDead if a rank fails."""
        self._broadcast(packed(Measure()))
        try:
            return self._own.measure()
        except GroupError as error:
            raise self._left_alone(f"ranks cannot be measured: {error}") from error

    def connect(self, hooks: RankHooks) -> None:
        """Where the log comes from and failures go to; before the first plan."""
        assert not self._plans, "a plan is in flight"
        self._hooks = hooks

    def submit(self, plan: StepPlan) -> None:
        self._check()
        self._plans.append(plan)
        log, digest = self._hooks.log()
        free = None if self._hooks.free is None else self._hooks.free()
        self._broadcast(packed(Step(plan, log, digest, free)))
        self._own.submit(plan, None if free is None else FreePages(said=free, own=free))

    def wait(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            if self._is_broken():
                return True  # although the leader's own worker may wait for the rank still
        if not self._own.wait(timeout_s):
            return False
        return self._all_done(self._plans[0].step, max(0.0, deadline_s - time.monotonic()))

    def _all_done(self, step: int, timeout_s: float) -> bool:
        """Whether `collect` need not wait for another rank, now or after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(self._settled, timeout_s):
                self._look(step)
            return self._settled()

    def _look(self, step: int) -> None:
        """This rank has ended its part of `step`: who has not, and does not move, has hung."""
        now_s = time.monotonic()
        for rank in [rank for rank, results in self._done.items() if not results]:
            stands = step, self._hooks.moved(rank)
            before, since_s = self._since.get(rank, (None, now_s))
            if before != stands:
                self._since[rank] = stands, now_s
            elif now_s - since_s >= self._patience_s:
                why = f"it has not ended step {step}, and not moved for {self._patience_s:g} s"
                self._fail(rank, why)

    def collect(self) -> StepResult:
        """See `Worker.collect`. Raises EngineDead, which names the rank, if one has failed."""
        self._check()
        plan = self._plans.popleft()
        try:
            own = self._own.collect()
        except GroupError as error:
            raise self._left_alone(str(error)) from error
        while not self._all_done(plan.step, _LOOK_S):
            pass
        self._check()
        with self._changed:
            results = [own, *(results.popleft() for results in self._done.values())]
        return merged(plan, results)

    def cancel(self, serial: int) -> None:
        self._broadcast(packed(Cancel(serial)))
        self._own.cancel(serial)

    def begin_load(self, path: str) -> None:
        """Let all other ranks read another checkpoint, while plans are run."""
        with self._changed:
            self._loaded.clear()
        self._broadcast(packed(Load(path)))

    def finish_load(self) -> list[str]:
        """Wait until they have; why those that cannot use it cannot. Raises EngineDead."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_broken() or len(self._loaded) == len(self._wires)
            )
            errors = [f"rank {r}: {error}" for r, error in self._loaded.items() if error]
        self._check()
        return errors

    def swap(self) -> None:
        """What they have read computes from now on; only while no plan is in flight."""
        self._broadcast(packed(Swap()))

    def _broadcast(self, frame: bytes) -> None:
        for rank, wire in self._wires.items():
            try:
                # What it has said before its end comes first: its reader sees both.
                with contextlib.suppress(ConnectionError):
                    wire.send(frame)
            except OSError as error:
                self._fail(rank, f"it takes no more messages ({error.strerror or error})")

    def read_page(self, ref: PageRef, component: int = 0) -> bytes:
        """A copy of a page's bytes, whoever owns it; no plan may be in flight. Where ranks share no
        memory: of a page of this one's owner, what this one holds of it."""
        return self._own.read_page(ref, component)

    def farewell(self) -> None:
        """What comes now is an orderly end: the ranks take a wire that closes for one."""
        self._broadcast(packed(End()))

    def stop(self) -> None:
        """Let all ranks give up what they run, and end. Returns at once; idempotent."""
        with self._changed:
            self._closing = True
        self._own.stop()
        for wire in self._wires.values():
            wire.shut()

    def close(self) -> None:
        """`stop`, wait for the ends of all, and give everything back."""
        self.stop()
        self._hooks.reap()
        self._own.close()
        for reader, wire in zip(self._readers, self._wires.values(), strict=True):
            reader.join()
            wire.close()

    # -- from the ranks; on the readers' threads

    def _read(self, rank: int, wire: Wire) -> None:
        for message in wire.up():
            self._take(rank, message)
        with self._changed:
            known = rank in self._failures or rank in self._hearsay
            closing = self._closing
        if not closing and not known:
            self._fail(rank, self._hooks.end_of(rank))

    def _take(self, rank: int, message: Up) -> None:
        if isinstance(message, Done):
            with self._changed:
                self._done[rank].append(message.result)
                self._changed.notify_all()
            return
        if isinstance(message, Loaded):
            with self._changed:
                self._loaded[rank] = message.error
                self._changed.notify_all()
            return
        if message.hearsay:
            with self._changed:
                self._hearsay[rank] = f"rank {rank}: {message.message}"
                self._changed.notify_all()
            self._hooks.on_failure()
            return
        self._fail(rank, message.message)

    def _fail(self, rank: int, why: str) -> None:
        with self._changed:
            self._failures.setdefault(rank, f"rank {rank} failed: {why}")
            self._changed.notify_all()
        self._hooks.on_failure()

    def _is_broken(self) -> bool:
        """Under _changed: whether a rank runs no more steps, this one or another."""
        return bool(self._failures or self._hearsay) or self._own.broken is not None

    def _settled(self) -> bool:
        """Under _changed: whether `collect` need not wait for another rank."""
        return self._is_broken() or all(self._done.values())

    def _check(self) -> None:
        failure = self.failure()
        if failure is not None:
            raise EngineDead(failure)


def merged(plan: StepPlan, results: Sequence[StepResult]) -> StepResult:
    """One result of all ranks. A row is reported by the rank that samples it; where a step was
    given up, by others too, and then what was sampled counts."""
    rows: dict[tuple[int, int], RowResult] = {}
    for result in results:
        assert result.step == plan.step, f"step {result.step} came before step {plan.step}"
        for row in result.rows:
            key = (row.row, row.serial)
            if key not in rows or rows[key].error is not None:
                rows[key] = row
    return StepResult(
        step=plan.step,
        rows=tuple(_sampled(row, rows) for row in plan.rows if row.sample),
        compute_s=max(result.compute_s for result in results),
        load_wait_s=max(result.load_wait_s for result in results),
    )


def _sampled(row: RowPlan, rows: Mapping[tuple[int, int], RowResult]) -> RowResult:
    found = rows.get((row.row, row.serial))
    if found is None:
        raise GroupError(f"no rank has sampled row {row.row} of serial {row.serial}")
    return found
