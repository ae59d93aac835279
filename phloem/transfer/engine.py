"""The transfer engine: one thread that copies, a store that reads and writes, results by poll.

submit --> jobs --> copy thread: a chunk at a time (layers of a load, pages of a backup)
   |                   |-- after each chunk: layer waiters are woken
   |                   `-- at the end: results --> poll
   `--> StorageMover --> PageStore (threads of its own) --> poll
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phloem.core.clock import Clock
from phloem.core.errors import PhloemError
from phloem.core.refs import flat_slots
from phloem.core.transfer import Transfer, TransferKind, TransferResult
from phloem.transfer.component import ComponentMemory
from phloem.transfer.jobs import CopyJob, next_job
from phloem.transfer.layer_wait import wait_for_layer
from phloem.transfer.page_link import LiveLoad, LoadNews
from phloem.transfer.storage import StorageMover

__all__ = ["TransferEngine", "TransferHooks"]

logger = logging.getLogger(__name__)

# One chunk: long enough that waking waiters costs nothing, short enough that a load need not wait.
CHUNK_BYTES = 16 << 20
_SLICE_S = 0.001  # with two things to wait for, each is looked at so often

_COPIES = (TransferKind.BACKUP_HOST, TransferKind.LOAD_BACK)


def _nothing(transfer: Transfer, position: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferHooks:
    """Named points for tests, called on the copy thread: they may block, or raise to fail it.

    `before_chunk(transfer, position)`: the next chunk begins at that layer (loads) or page
    (backups). `whole_layers`: a load moves one layer at a time, whatever its size.
    """

    before_chunk: Callable[[Transfer, int], None] = _nothing
    whole_layers: bool = False


class TransferEngine:
    """Implements `core.transfer.Transfers` and `LayerGate`. Close it.

    `submit, poll, released, wait, cancel` and attaching belong to one thread, the controller's;
    `wait_layer` to the worker's; `step_finished` to any. `components`: what `Transfer.component`
    counts, at least one.
    """

    def __init__(
        self,
        components: Sequence[ComponentMemory],
        clock: Clock,
        *,
        hooks: TransferHooks | None = None,
        chunk_bytes: int | None = None,
        on_loads: Callable[[LoadNews], None] | None = None,
    ) -> None:
        """`chunk_bytes`: None: CHUNK_BYTES. `on_loads`: called on the copy thread after every chunk
        of a load, and at its end, in whatever way it ends."""
        assert components, "a model has at least one component"
        self._components = tuple(components)
        self._hooks = hooks or TransferHooks()
        self._chunk_bytes, self._on_loads = chunk_bytes, on_loads
        self._storage = StorageMover([each.arena for each in components], clock)
        # One lock, three things to wait for: a job that can go on, a layer, a result.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._layers = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        # All below: under _lock.
        self._jobs: list[CopyJob] = []
        self._loads: dict[int, CopyJob] = {}  # until they are polled
        self._newest_load = -1
        self._results: list[TransferResult] = []
        self._finished_step = -1
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="phloem-transfer", daemon=True)
        self._thread.start()

    @property
    def storage(self) -> StorageMover:
        """Where stores are attached and detached."""
        return self._storage

    def submit(self, transfer: Transfer) -> None:
        if transfer.kind not in _COPIES:
            self._storage.submit(transfer)
            return
        job = CopyJob(transfer, self._components[transfer.component])
        with self._lock:
            assert not self._closed, "the transfer engine is closed"
            self._jobs.append(job)
            if job.is_load:
                self._loads[transfer.id] = job
                self._newest_load = transfer.id
            self._work.notify()

    def poll(self) -> list[TransferResult]:
        with self._lock:
            results, self._results = self._results, []
            for result in results:
                self._loads.pop(result.id, None)
        return results + self._storage.poll()

    def released(self) -> list[int]:
        return self._storage.released()

    def wait(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            if self._storage.ready:
                return
            storing = self._storage.busy
            with self._lock:
                if self._results:
                    return
                if not storing:
                    self._ended.wait_for(lambda: bool(self._results), left)
                    return
                copying = bool(self._jobs)
            self._storage.wait(min(left, _SLICE_S) if copying else left)

    def cancel(self, transfer_id: int) -> None:
        self._storage.cancel(transfer_id)
        with self._lock:
            for job in self._jobs:
                if job.transfer.id == transfer_id:
                    job.cancelled = True
            self._work.notify()

    def step_finished(self, step: int) -> None:
        with self._lock:
            if step > self._finished_step:
                self._finished_step = step
                self._work.notify()

    def wait_layer(self, transfer_ids: tuple[int, ...], layer: int) -> None:
        wait_for_layer(self._layers, self._has_layer, transfer_ids, layer)

    def _has_layer(self, transfer_id: int, layer: int) -> bool:
        """Whether nobody need wait; a load that is unknown has been complete for long."""
        job = self._loads.get(transfer_id)
        if job is None or job.ended or self._closed:
            return True
        return job.progress >= job.memory.needed(layer)

    def close(self) -> None:
        """Drop what is queued, let the running chunk end, join the thread. Idempotent."""
        with self._lock:
            self._closed = True
            self._work.notify()
            self._layers.notify_all()
        self._thread.join()
        self._storage.close()

    def _serve(self) -> None:
        while (job := self._take()) is not None:
            self._advance(job)

    def _take(self) -> CopyJob | None:
        """Wait for a job that is ready; None when closed."""
        with self._lock:
            while not self._closed:
                job = next_job(self._jobs, self._finished_step)
                if job is not None:
                    return job
                self._work.wait()
            return None

    def _advance(self, job: CopyJob) -> None:
        """One chunk of `job`, without the lock; then tell everybody."""
        progress, error = job.progress, None
        started = time.perf_counter()
        if not job.cancelled and progress < job.goal:
            try:
                self._hooks.before_chunk(job.transfer, progress)
                progress = self._copy(job, progress)
            except Exception as failure:  # the thread's entry point: the others go on
                error = f"{type(failure).__name__}: {failure}"
                trace = None if isinstance(failure, PhloemError) else failure
                logger.error(
                    "%s %d failed: %s",
                    job.transfer.kind.value,
                    job.transfer.id,
                    failure,
                    exc_info=trace,
                )
        with self._lock:
            job.seconds += time.perf_counter() - started
            job.progress, job.error = progress, error
            if job.cancelled or error is not None or progress >= job.goal:
                job.ended = True
                self._jobs.remove(job)
                self._results.append(job.result())
                self._ended.notify_all()
            self._layers.notify_all()
            news = self._news()
        if job.is_load and self._on_loads is not None:
            self._on_loads(news)

    def _news(self) -> LoadNews:
        """Under _lock."""
        live = tuple(
            LiveLoad(job.transfer.id, job.transfer.component, job.progress)
            for job in self._loads.values()
            if not job.ended
        )
        return LoadNews(self._newest_load, live)

    def _copy(self, job: CopyJob, progress: int) -> int:
        """Copy a chunk; returns the progress after it."""
        transfer, copier = job.transfer, job.memory.copier
        chunk_bytes = self._chunk_bytes or CHUNK_BYTES
        device = flat_slots(transfer.device, job.memory.pages_per_owner)
        host, spec = transfer.host, job.memory.spec
        if transfer.kind is TransferKind.BACKUP_HOST:
            end = min(len(host), progress + max(1, chunk_bytes // spec.page_bytes))
            copier.to_host(device[progress:end], host[progress:end])
            return end
        layer_bytes = len(host) * spec.page_bytes // spec.num_layers
        count = 1 if self._hooks.whole_layers else max(1, chunk_bytes // max(1, layer_bytes))
        end = min(spec.num_layers, progress + count)
        copier.to_device(device, host, progress, end)
        return end
