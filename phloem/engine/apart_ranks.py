"""Ranks that this process starts and that share no memory with it: each has a GPU of its own."""

from __future__ import annotations

import dataclasses
import shutil
import socket
import tempfile

from phloem.core.errors import EngineDead
from phloem.core.mesh import ShardAxis
from phloem.engine.apart_seat import ApartSeat
from phloem.engine.ranks import StartedRanks
from phloem.transfer import PageLink
from phloem.worker import RankPlace
from phloem.worker.peers import PATIENCE_S

__all__ = ["ApartRanks"]


class ApartRanks(StartedRanks):
    """As `StartedRanks`, and they meet at a store of this start alone, in a folder that goes when
    rank 0 leaves its place. `device`: rank 0's."""

    def __init__(self, axis: ShardAxis, device: str, timeout_s: float) -> None:
        self._device, self._timeout_s = device, timeout_s
        folder = self._folder = tempfile.mkdtemp(prefix="phloem-ranks-")  # for this user alone
        self._seat = ApartSeat(rank=0, axis=axis, folder=folder)
        pairs = [socket.socketpair() for _ in range(1, axis.mesh.world)]
        self._links = tuple(
            PageLink(ours, rank=rank, patience_s=PATIENCE_S)
            for rank, (ours, _) in enumerate(pairs, 1)
        )
        seats = [
            ApartSeat(rank=rank, axis=axis, folder=folder, pages=theirs.fileno())
            for rank, (_, theirs) in enumerate(pairs, 1)
        ]
        try:
            super().__init__(seats)
        finally:
            for _, theirs in pairs:
                theirs.close()
        for link, wire in zip(self._links, self.wires, strict=True):
            link.lost = wire.shut

    def _take_place(self, max_running: int) -> RankPlace:
        try:
            place = self._seat.take(self._device, max_running, self._timeout_s)
        except EngineDead as error:
            raise EngineDead(f"{error}{self._ended()}") from None
        return dataclasses.replace(place, links=self._links, on_leave=self._remove_store)

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
        for link in self._links:
            link.close()
        self._remove_store()

    def _remove_store(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
