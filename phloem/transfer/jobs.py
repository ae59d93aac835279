"""What the copy thread has to do: jobs, their order, and how far each one is."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from phloem.core.transfer import Transfer, TransferKind, TransferResult
from phloem.transfer.component import ComponentMemory

__all__ = ["CopyJob", "next_job"]


@dataclass(slots=True, eq=False)
class CopyJob:
    """A BACKUP_HOST (pages done so far) or a LOAD_BACK (layers done so far) of one component."""

    transfer: Transfer
    memory: ComponentMemory
    progress: int = 0  # pages of a backup, layers of a load
    cancelled: bool = False
    ended: bool = False
    error: str | None = None
    seconds: float = field(default=0.0)

    @property
    def is_load(self) -> bool:
        return self.transfer.kind is TransferKind.LOAD_BACK

    @property
    def goal(self) -> int:
        """The progress at which it is complete."""
        if self.memory.spec.page_bytes == 0:
            return 0
        return len(self.memory.layers) if self.is_load else self.transfer.num_pages

    @property
    def next_layer(self) -> int:
        """The model's layer that waits for the load's next chunk; past the last one: -1."""
        layers = self.memory.layers
        return layers[self.progress] if self.progress < len(layers) else -1

    def result(self) -> TransferResult:
        """A load has all its pages or none; a backup those that were copied."""
        num_pages = self.transfer.num_pages
        done = np.zeros(num_pages, dtype=np.bool_)
        whole = self.progress == self.goal
        complete = num_pages if whole else 0 if self.is_load else self.progress
        done[:complete] = True
        return TransferResult(
            id=self.transfer.id,
            done=done,
            num_bytes=complete * self.memory.spec.page_bytes,
            seconds=self.seconds,
            error=self.error,
        )


def next_job(jobs: list[CopyJob], finished_step: int) -> CopyJob | None:
    """Loads before backups; among loads the one that the model's next layer waits for.

    A cancelled job is always ready: it only has to be reported.
    """
    best: CopyJob | None = None
    for job in jobs:
        if job.cancelled:
            return job
        if job.transfer.after_step > finished_step:
            continue
        if best is None or (job.is_load and (not best.is_load or job.next_layer < best.next_layer)):
            best = job
    return best
