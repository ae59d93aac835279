"""A rank that is not the leader: runs the plans that it is sent, and keeps a copy of the cache.

reader thread   records: the plan to the runner, then the log to the replica; cancellations
caller's        the runner, one plan after the other; results go up
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from phloem.core.errors import ConfigError, GroupError, PhloemError
from phloem.core.plan import StepPlan
from phloem.worker.load import LoadedWorker
from phloem.worker.torch_worker import InlineWorker
from phloem.worker.verify import FreePages
from phloem.worker.wire import (
    Cancel,
    Done,
    End,
    Failed,
    Load,
    Loaded,
    Measure,
    Step,
    Swap,
    Wire,
    packed,
)

__all__ = ["Follower", "NoReplica", "Replica"]

logger = logging.getLogger(__name__)


class Replica(Protocol):
    """This rank's copy of the replicated state."""

    def apply(self, log: bytes) -> None:
        """Carry out the commands of one record."""
        ...

    def digest(self) -> str:
        """A fingerprint of all of it."""
        ...

    def free_by_pool(self) -> dict[str, int]:
        """Free pages of every pool, by its name."""
        ...


class NoReplica:
    """Of a rank that is told nothing about the cache."""

    def apply(self, log: bytes) -> None:
        """There are no commands."""
        assert not log, "a log came to a rank without a replica"

    def digest(self) -> str:
        return ""

    def free_by_pool(self) -> dict[str, int]:
        return {}


class Follower:
    """Owns the wire and the worker, which runs plans inline."""

    def __init__(self, rank: int, wire: Wire, loaded: LoadedWorker, replica: Replica) -> None:
        assert isinstance(loaded.worker, InlineWorker), "the plans are run on the caller's thread"
        self._rank, self._wire, self._replica = rank, wire, replica
        self._worker, self._reload = loaded.worker, loaded.reload
        self._swap: Callable[[], None] | None = None  # weights that were read and not yet used
        self._acts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failing = threading.Lock()
        self._failure: str | None = None  # set once the leader has been told
        self._in_order = False  # the leader has said that it ends

    def serve(self) -> str | None:
        """Run plans until the leader closes the wire; why not to its end, if something failed, here
        or with the leader."""
        reader = threading.Thread(target=self._read, name=f"phloem-rank{self._rank}", daemon=True)
        reader.start()
        try:
            while (act := self._acts.get()) is not None and self._failure is None:
                act()
        except Exception as error:  # the rank's entry point: the leader hears of it
            self._fail(error)
        finally:
            self._worker.close()
            self._wire.shut()
            reader.join()
            self._wire.close()
        if self._failure is None and not self._in_order:
            return "the leader is gone"
        return self._failure

    def _run(self, plan: StepPlan, free: FreePages | None = None) -> None:
        self._worker.submit(plan, free)
        self._send(packed(Done(self._worker.collect())))

    def _measure(self) -> None:
        self._worker.measure()  # the leader reads its own figures, which are the slowest rank's

    def _read(self) -> None:
        try:
            for message in self._wire.down():
                match message:
                    case Step(free=None):
                        self._acts.put(partial(self._run, message.plan))
                        self._take_log(message)
                    case Step(free=dict() as said):
                        self._take_log(message)
                        free = FreePages(said=said, own=self._replica.free_by_pool())
                        self._acts.put(partial(self._run, message.plan, free))
                    case Measure():
                        self._acts.put(self._measure)
                    case Cancel():
                        self._worker.cancel(message.serial)
                    case Load():
                        self._swap = None  # of a load that another rank could not carry out
                        threading.Thread(
                            target=self._load, args=(message.path,), daemon=True
                        ).start()
                    case Swap():
                        assert self._swap is not None, "nothing was loaded"
                        self._acts.put(self._swap)
                        self._swap = None
                    case End():
                        self._in_order = True
        except Exception as error:  # as above
            self._fail(error)
        self._worker.stop()
        self._acts.put(None)

    def _take_log(self, record: Step) -> None:
        self._replica.apply(record.log)
        if record.digest is not None and (mine := self._replica.digest()) != record.digest:
            step = record.plan.step
            raise GroupError(
                f"its cache differs from the leader's at step {step}: the leader's digest is "
                f"{record.digest}, its own {mine}",
                ranks=(self._rank,),
            )

    def _load(self, path: str) -> None:
        """Body of a thread; the leader waits for its answer before it says more of weights."""
        error: str | None = None
        try:
            self._swap = self._reload(Path(path))
        except ConfigError as refusal:
            error = str(refusal)
        except Exception as failure:  # the thread's entry point: the leader hears of it
            self._fail(failure)
            return
        self._send(packed(Loaded(error)))

    def _fail(self, error: Exception) -> None:
        """Tell the leader, once, before the wire may be closed."""
        with self._failing:
            if self._failure is not None:
                return
            known = isinstance(error, PhloemError)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            if not known:
                logger.error("rank %d failed", self._rank, exc_info=error)
            of_others = isinstance(error, GroupError) and self._rank not in error.ranks
            self._send(packed(Failed(text, hearsay=of_others)))
            self._failure = text

    def _send(self, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # the leader is gone: the reader has seen it
            self._wire.send(frame)
