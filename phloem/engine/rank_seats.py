"""What a rank's process inherits: its seat at the board of progress, and memory that all map."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from phloem.core.mesh import Mesh, ShardAxis
from phloem.groups import GroupSeat, Seat, ShmGroup, ShmProgress, progress_seats, shm_seats
from phloem.kv.layout import PageLayout
from phloem.pools import DevicePool
from phloem.worker import Peers, RankPlace, SampledTokens
from phloem.worker.peers import PATIENCE_S

__all__ = ["RankSeat", "rank_seats", "size_memory"]

SeatT = TypeVar("SeatT", bound=Seat)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeat:
    """Descriptors: plain numbers, that travel as JSON. `group` and `row` as of `RankPlace`; None:
    nobody else is in it. `pools`: by component. `FLAG`: of the command line on which it travels."""

    FLAG: ClassVar[str] = "--seat"

    axis: ShardAxis
    progress: Seat
    group: GroupSeat | None
    row: GroupSeat | None
    pools: tuple[int, ...]
    sampled: int

    @property
    def rank(self) -> int:
        return self.progress.rank

    @property
    def fds(self) -> tuple[int, ...]:
        groups = [seat.fds for seat in (self.group, self.row) if seat is not None]
        fds = [fd for group in groups for fd in group]
        return (*self.progress.fds, *fds, *self.pools, self.sampled)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankSeat:
        fields = json.loads(text)
        seat, axis = fields["progress"], fields["axis"]
        return cls(
            axis=ShardAxis(**(axis | {"mesh": Mesh(**axis["mesh"])})),
            progress=Seat(**(seat | {"bells": tuple(seat["bells"])})),
            group=_group_seat(fields["group"]),
            row=_group_seat(fields["row"]),
            pools=tuple(fields["pools"]),
            sampled=fields["sampled"],
        )

    def renumbered(self, fds: Sequence[int]) -> RankSeat:
        """The same seat where its `fds` have other numbers, in their order."""
        number = dict(zip(self.fds, fds, strict=True)) | {-1: -1}
        return dataclasses.replace(
            self,
            progress=_renumbered(self.progress, number),
            group=None if self.group is None else _renumbered(self.group, number),
            row=None if self.row is None else _renumbered(self.row, number),
            pools=tuple(number[fd] for fd in self.pools),
            sampled=number[self.sampled],
        )

    def take(self) -> RankPlace:
        """Map everything, once it has its size; the descriptors are given back."""
        return RankPlace(
            peers=Peers(ShmProgress(self.progress)),
            axis=self.axis,
            pools=tuple(_mapped(fd) for fd in self.pools),
            sampled=_mapped(self.sampled),
            group=None if self.group is None else ShmGroup(self.group),
            row=None if self.row is None else ShmGroup(self.row),
        )

    def close(self) -> None:
        """Give this process's copies back."""
        for fd in self.fds:
            os.close(fd)


def _renumbered(seat: SeatT, number: Mapping[int, int]) -> SeatT:
    bells = tuple(number[fd] for fd in seat.bells)
    return dataclasses.replace(seat, memory=number[seat.memory], bells=bells)


def _group_seat(fields: dict[str, Any] | None) -> GroupSeat | None:
    if fields is None:
        return None
    lists = {"bells": tuple(fields["bells"]), "members": tuple(fields["members"])}
    return GroupSeat(**(fields | lists))


def _group_seats(axis: str, ranks: tuple[int, ...]) -> dict[int, GroupSeat]:
    """By rank; none for a group of one."""
    if len(ranks) == 1:
        return {}
    # In what travels as well a rank has so long.
    seats = shm_seats(len(ranks), axis=axis, timeout_s=PATIENCE_S, members=ranks)
    return dict(zip(ranks, seats, strict=True))


def rank_seats(axis: ShardAxis, num_components: int) -> list[RankSeat]:
    """One per rank. The memory is empty until `size_memory`. The caller owns the descriptors."""
    pools = [os.memfd_create("phloem-pages", os.MFD_CLOEXEC) for _ in range(num_components)]
    sampled = os.memfd_create("phloem-sampled", os.MFD_CLOEXEC)
    groups: dict[int, GroupSeat] = {}
    rows: dict[int, GroupSeat] = {}
    for part in range(axis.ranks_per_owner):
        groups |= _group_seats("cp", axis.peers_of(part))
    for first in range(0, axis.mesh.world, axis.mesh.tp):
        rows |= _group_seats("tp", axis.mesh.row_of(first))
    seats = [
        RankSeat(
            axis=axis,
            progress=seat,
            group=groups.get(seat.rank),
            row=rows.get(seat.rank),
            pools=tuple(os.dup(fd) for fd in pools),
            sampled=os.dup(sampled),
        )
        for seat in progress_seats(axis.mesh.world)
    ]
    for fd in (*pools, sampled):
        os.close(fd)
    return seats


def size_memory(seat: RankSeat, layouts: Sequence[PageLayout], max_running: int) -> None:
    """Give the shared memory its size, for all ranks; it is zero, and costs nothing until used."""
    for fd, layout in zip(seat.pools, layouts, strict=True):
        os.ftruncate(fd, DevicePool.shared_bytes(layout, seat.axis.size) or 1)
    os.ftruncate(seat.sampled, SampledTokens.num_bytes(max_running))


def _mapped(fd: int) -> mmap.mmap:
    memory = mmap.mmap(fd, 0)
    os.close(fd)
    return memory
