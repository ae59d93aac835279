"""Groups of ranks: threads of one process, processes of one machine, or torch.distributed."""

from __future__ import annotations

from phloem.groups.faulty import FaultyGroup
from phloem.groups.local import LocalGroup, local_groups
from phloem.groups.shm import Seat, ShmGroup, shm_seats
from phloem.groups.torch_group import TorchGroup

__all__ = [
    "FaultyGroup",
    "LocalGroup",
    "Seat",
    "ShmGroup",
    "TorchGroup",
    "local_groups",
    "shm_seats",
]
