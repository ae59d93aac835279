"""Ranks that this process starts and that share no memory with it: each has a GPU of its own."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile

from phloem.core.errors import EngineDead
from phloem.core.mesh import ShardAxis
from phloem.engine.apart_seat import ApartSeat
from phloem.engine.ranks import StartedRanks
from phloem.worker import RankPlace

__all__ = ["ApartRanks"]


class ApartRanks(StartedRanks):
    """As `StartedRanks`, and they meet at a store of this start alone, in a folder that goes when
    rank 0 leaves its place. `device`: rank 0's."""

    def __init__(self, axis: ShardAxis, device: str, timeout_s: float) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._folder = tempfile.mkdtemp(prefix="phloem-ranks-")  # for this user alone
        seats = [
            ApartSeat(rank=rank, axis=axis, folder=self._folder) for rank in range(axis.mesh.world)
        ]
        self._seat = seats[0]
        super().__init__(seats[1:])

    def _take_place(self, max_running: int) -> RankPlace:
        try:
            place = self._seat.take(self._device, max_running, self._timeout_s)
        except EngineDead as error:
            raise EngineDead(f"{error}{self._ended()}") from None
        return dataclasses.replace(place, on_leave=self._remove_store)

    def _ended(self) -> str:
        """Who has ended meanwhile, if anybody has: nobody else is to blame."""
        ends = [
            f"; rank {rank} failed: {self.end_of(rank)}"
            for rank, each in self._ranks.items()
            if each.process.poll() is not None
        ]
        return "".join(ends)

    def _leave_place(self) -> None:
        super()._leave_place()
        self._remove_store()

    def _remove_store(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
