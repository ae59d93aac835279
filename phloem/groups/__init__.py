"""Groups of ranks: threads of one process, processes of one machine, or torch.distributed."""

from __future__ import annotations

from phloem.groups.faulty import FaultyGroup
from phloem.groups.link import Link, LinkedGroup
from phloem.groups.local import LocalGroup, local_groups
from phloem.groups.progress import (
    LAST_LAYER,
    LocalProgress,
    Progress,
    ShmProgress,
    local_progress,
    progress_seats,
)
from phloem.groups.seats import Seat
from phloem.groups.shm import GroupSeat, ShmGroup, shm_seats
from phloem.groups.torch_group import TorchGroup

__all__ = [
    "LAST_LAYER",
    "FaultyGroup",
    "GroupSeat",
    "Link",
    "LinkedGroup",
    "LocalGroup",
    "LocalProgress",
    "Progress",
    "Seat",
    "ShmGroup",
    "ShmProgress",
    "TorchGroup",
    "local_groups",
    "local_progress",
    "progress_seats",
    "shm_seats",
]
