"""Carries out an operator's commands between two passes of the loop.

What takes long (opening a directory, reading weights) runs on a thread of its own, one thing at a
time; the loop goes on meanwhile. What changes the engine runs on the loop's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from phloem.core.errors import ConfigError, PhloemError
from phloem.engine.commands import (
    AttachStorage,
    ClearCache,
    Command,
    CommandReply,
    DetachStorage,
    ListCache,
    ListDecisions,
    ListRemote,
    Reply,
    UpdateWeights,
    VerifyCache,
)
from phloem.engine.inspection import list_cache, list_decisions, list_remote, verify_cache
from phloem.engine.tier_parts import ModelSlot, TierParts
from phloem.kv.keys import KeyFacts
from phloem.loop import EngineLoop

__all__ = ["Operator"]

_LOOK_S = 0.005  # an idle loop looks at a running command so often


@dataclass(slots=True)
class _Job:
    """A command in two parts: `prepare` on the thread, then `finish` on the loop's."""

    reply: Reply
    prepare: Callable[[], Any]
    finish: Callable[[Any], dict[str, Any]]
    needs_idle: bool = False
    future: Future[Any] | None = None


class Operator:
    """One per core. All methods belong to the loop's thread."""

    def __init__(
        self,
        loop: EngineLoop,
        tiers: TierParts | None,
        model: ModelSlot | None,
    ) -> None:
        self._loop, self._tiers, self._model = loop, tiers, model
        self._storage_at = None if tiers is None else tiers.storage_at
        self._jobs: deque[_Job] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self.generation = 0  # grows with every update of the weights

    @property
    def wants_idle(self) -> bool:
        """New requests have to wait: the weights are about to change."""
        job = self._jobs[0] if self._jobs else None
        return job is not None and job.needs_idle and job.future is not None and job.future.done()

    def command(self, command: Command, reply: Reply) -> None:
        """Start it; `reply` is called once, now or in a later pass."""
        try:
            done = self._start(command, reply)
        except PhloemError as error:
            done = CommandReply(error=str(error))
        if done is not None:
            reply(done)

    def _start(self, command: Command, reply: Reply) -> CommandReply | None:
        """The reply, if it is there at once."""
        cache = self._loop.scheduler.cache
        match command:
            case ListCache():
                return CommandReply(result=list_cache(cache, command.limit))
            case ListDecisions():
                return CommandReply(result=self._decisions(command))
            case ListRemote():
                return CommandReply(result=list_remote(self._loop.scheduler.remote, command.limit))
            case VerifyCache():
                return CommandReply(result=verify_cache(cache))
            case DetachStorage():
                return CommandReply(result=self._detach())
            case AttachStorage():
                self._begin_attach(command, reply)
            case ClearCache():
                return self._clear(command, reply)
            case UpdateWeights():
                self._begin_update(command, reply)
        return None

    def advance(self, *, loop_busy: bool) -> bool:
        """Once a pass; True while something is going on. Waits a moment if the loop is idle."""
        if not self._jobs:
            return False
        job = self._jobs[0]
        if job.future is None:
            job.future = self._pool().submit(job.prepare)
        if not job.future.done():
            if not loop_busy:
                wait([job.future], _LOOK_S)
            return True
        if job.needs_idle and not self._loop.idle and job.future.exception() is None:
            return True
        self._jobs.popleft()
        job.reply(self._finish(job))
        return True

    def _finish(self, job: _Job) -> CommandReply:
        assert job.future is not None, "a job ends after it has begun"
        try:
            return CommandReply(result=job.finish(job.future.result()))
        except (PhloemError, OSError) as error:
            return CommandReply(error=str(error))

    def _pool(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="phloem-operator")
        return self._thread

    def close(self) -> None:
        """Answer what is left, and give back the thread."""
        while self._jobs:
            job = self._jobs.popleft()
            job.reply(CommandReply(error="the engine is shutting down"))
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    # Storage.

    def _begin_attach(self, command: AttachStorage, reply: Reply) -> None:
        tiers = self._need_tiers()
        if tiers.storage.attached():
            raise ConfigError("storage is attached already: detach it first")

        def finish(store: Any) -> dict[str, Any]:
            if tiers.storage.attached():  # by a command that came first
                store.close(0.0)
                raise ConfigError("storage is attached already: detach it first")
            tiers.storage.attach(store)
            self._storage_at = (command.directory, command.size_bytes)
            return {"directory": command.directory, "objects": store.stats().objects}

        prepare = partial(tiers.open_storage, command.directory, command.size_bytes)
        self._jobs.append(_Job(reply, prepare, finish))

    def _detach(self) -> dict[str, Any]:
        tiers = self._need_tiers()
        was = tiers.storage.attached()
        tiers.storage.detach()
        self._storage_at = None
        return {"detached": was}

    def _clear(self, command: ClearCache, reply: Reply) -> CommandReply | None:
        if not command.storage or self._storage_at is None:
            return CommandReply(result={"locked_pages": self._loop.flush()})
        tiers = self._need_tiers()
        directory, size_bytes = self._storage_at
        tiers.storage.detach()

        def prepare() -> Any:
            tiers.clear_directory(directory)
            return tiers.open_storage(directory, size_bytes)

        def finish(store: Any) -> dict[str, Any]:
            tiers.storage.attach(store)
            return {"locked_pages": self._loop.flush(), "storage": directory}

        self._jobs.append(_Job(reply, prepare, finish))
        return None

    def _decisions(self, command: ListDecisions) -> dict[str, Any]:
        tiers = self._loop.scheduler.tiers
        if tiers is None:
            raise ConfigError(
                "this engine caches on the device alone, where there is nothing to decide: start "
                "it with --host-memory"
            )
        return list_decisions(tiers.decisions, command.limit, command.request_id)

    def _need_tiers(self) -> TierParts:
        if self._tiers is None:
            raise ConfigError(
                "this engine has no host tier for storage to pass through: start it with "
                "--host-memory"
            )
        return self._tiers

    # Weights.

    def _begin_update(self, command: UpdateWeights, reply: Reply) -> None:
        model = self._model
        if model is None:
            raise ConfigError("this engine's weights cannot be updated")

        def finish(swap: Callable[[], KeyFacts]) -> dict[str, Any]:
            # Nothing runs, nothing is queued: whoever came before has its answer.
            self._loop.flush()
            facts, tiers = swap(), self._loop.scheduler.tiers
            if tiers is not None:
                tiers.change_identity(facts)
            self.generation += 1
            return {"path": command.path, "generation": self.generation}

        self._jobs.append(_Job(reply, partial(model.load, command.path), finish, needs_idle=True))
