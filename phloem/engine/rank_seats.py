"""What a rank's process inherits: its seat at the board of progress, and memory that all map."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from phloem.groups import GroupSeat, Seat, ShmGroup, ShmProgress, progress_seats, shm_seats
from phloem.kv.layout import PageLayout
from phloem.pools import DevicePool
from phloem.worker import Peers, RankPlace, SampledTokens
from phloem.worker.peers import PATIENCE_S

__all__ = ["RankSeat", "rank_seats", "size_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeat:
    """Descriptors: plain numbers, that travel as JSON. `pools`: by component."""

    progress: Seat
    group: GroupSeat
    pools: tuple[int, ...]
    sampled: int

    @property
    def fds(self) -> tuple[int, ...]:
        return (*self.progress.fds, *self.group.fds, *self.pools, self.sampled)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankSeat:
        fields = json.loads(text)
        seat, group = fields["progress"], fields["group"]
        return cls(
            progress=Seat(**(seat | {"bells": tuple(seat["bells"])})),
            group=GroupSeat(**(group | {"bells": tuple(group["bells"])})),
            pools=tuple(fields["pools"]),
            sampled=fields["sampled"],
        )

    def take(self) -> RankPlace:
        """Map everything, once it has its size; the descriptors are given back."""
        return RankPlace(
            peers=Peers(ShmProgress(self.progress)),
            pools=tuple(_mapped(fd) for fd in self.pools),
            sampled=_mapped(self.sampled),
            group=ShmGroup(self.group),
        )

    def close(self) -> None:
        """Give this process's copies back."""
        for fd in self.fds:
            os.close(fd)


def rank_seats(size: int, num_components: int) -> list[RankSeat]:
    """One per rank. The memory is empty until `size_memory`. The caller owns the descriptors."""
    pools = [os.memfd_create("phloem-pages", os.MFD_CLOEXEC) for _ in range(num_components)]
    sampled = os.memfd_create("phloem-sampled", os.MFD_CLOEXEC)
    groups = shm_seats(size, timeout_s=PATIENCE_S)  # in what travels as well a rank has so long
    seats = [
        RankSeat(
            progress=seat,
            group=group,
            pools=tuple(os.dup(fd) for fd in pools),
            sampled=os.dup(sampled),
        )
        for seat, group in zip(progress_seats(size), groups, strict=True)
    ]
    for fd in (*pools, sampled):
        os.close(fd)
    return seats


def size_memory(seat: RankSeat, layouts: Sequence[PageLayout], max_running: int) -> None:
    """Give the shared memory its size, for all ranks; it is zero, and costs nothing until used."""
    for fd, layout in zip(seat.pools, layouts, strict=True):
        os.ftruncate(fd, DevicePool.shared_bytes(layout, seat.progress.size) or 1)
    os.ftruncate(seat.sampled, SampledTokens.num_bytes(max_running))


def _mapped(fd: int) -> mmap.mmap:
    memory = mmap.mmap(fd, 0)
    os.close(fd)
    return memory
