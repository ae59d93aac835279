"""Transfers: pages that cross a tier boundary, decided by the controller, carried out elsewhere.

    device --BACKUP_HOST--> host --BACKUP_STORAGE--> storage
    device <--LOAD_BACK---- host <----PREFETCH------ storage

    submit -----> in flight -----> TransferResult, exactly once, from poll
       `-cancel----^   (pages that had not started are then reported as not done)

Ownership. From submit until its result is polled, a transfer owns nothing but may read its source
and write its destination: the controller keeps both locked or reserved. A destination is a page
that was allocated for it and that no request reads before it is committed; one exception, for
overlap: a step that names a LOAD_BACK in `StepPlan.loads` may read its pages, and the worker waits
for each layer of it before that layer.

`after_step`: the transfer may touch device pages only when that step has finished. For a load: the
last step in flight when its destination was allocated (that step may still read what the page held
before). For a backup: the step that computed the page.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from phloem.core.refs import NO_REFS, PageRefs

__all__ = ["LayerGate", "Transfer", "TransferKind", "TransferResult", "Transfers"]


class TransferKind(enum.Enum):
    """The four ways between tiers, and a question that moves nothing."""

    BACKUP_HOST = "backup_host"
    LOAD_BACK = "load_back"
    BACKUP_STORAGE = "backup_storage"
    PREFETCH = "prefetch"
    PROBE = "probe"  # which of `links` are in storage: so host pages are reserved for hits only


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Pages to move, in order: page i goes between device[i], host[i] and links[i].

    All are pages of one `component` (0: full, 1: window): each has a device pool, a host arena and
    storage keys of its own. `device` are PageRefs, `host` slots of the host arena (int64 (n,)
    both), `links` the pages' chained content links (see `kv.keys`); those that the kind does not
    need are empty.
    """

    id: int
    kind: TransferKind
    component: int = 0
    device: PageRefs = field(default_factory=lambda: NO_REFS)
    host: npt.NDArray[np.int64] = field(default_factory=lambda: NO_REFS)
    links: tuple[bytes, ...] = ()
    after_step: int = -1
    deadline_s: float = math.inf  # on the loop's clock; storage only

    @property
    def num_pages(self) -> int:
        return max(len(self.device), len(self.host), len(self.links))


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """What became of a transfer. `done[i]`: page i arrived whole and verified (PROBE: is there)."""

    id: int
    done: npt.NDArray[np.bool_]  # (n,)
    held: npt.NDArray[np.bool_] | None = None  # host slots quarantined until `released` names id
    num_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None


class Transfers(Protocol):
    """Carries transfers out on threads of its own. Called by the tier controller only."""

    def submit(self, transfer: Transfer) -> None:
        """Queue it and return at once."""
        ...

    def poll(self) -> list[TransferResult]:
        """What has ended since the last call; never waits."""
        ...

    def released(self) -> list[int]:
        """Ids of transfers whose held host slots are free again; never waits."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until `poll` or `released` would bring something, at most `timeout_s`."""
        ...

    def cancel(self, transfer_id: int) -> None:
        """Start no more pages of it; its result still comes."""
        ...

    def step_finished(self, step: int) -> None:
        """All steps up to `step` have finished: releases what waits in `after_step`.

        May be called from any thread, and more than once: the worker calls it as soon as it can.
        """
        ...

    def close(self) -> None:
        """Finish or drop what is queued, and give back threads."""
        ...


class LayerGate(Protocol):
    """What a worker sees of the transfers: it waits for layers, and tells when a step is over."""

    def wait_layer(self, transfer_ids: tuple[int, ...], layer: int) -> None:
        """Return when `layer` of all these loads is on the device, or will never be."""
        ...

    def step_finished(self, step: int) -> None:
        """See `Transfers.step_finished`."""
        ...
