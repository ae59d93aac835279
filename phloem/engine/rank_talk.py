"""What the leader says to the other ranks until steps begin, however they came to life."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import TypeVar

from phloem.config import Config
from phloem.core.errors import ConfigError, EngineDead
from phloem.engine.rank_messages import (
    RankHello,
    RankPages,
    RankReady,
    RankStart,
    ToRank,
    receive,
)
from phloem.engine.rank_seats import RankSeat, size_memory
from phloem.kv.layout import PageLayout
from phloem.worker import LoadedWorker, RankPlace, Wire, packed

__all__ = ["RankTalk"]

MessageT = TypeVar("MessageT")


class RankTalk(abc.ABC):
    """Ranks 1 ... size - 1, by their wires, and the place of rank 0."""

    _own: RankSeat | None = None  # rank 0's, where ranks share memory
    _place: RankPlace | None = None  # once it has been taken

    @property
    @abc.abstractmethod
    def wires(self) -> list[Wire]:
        """In order of rank, from rank 1 on; handed over with the first step."""

    @abc.abstractmethod
    def end_of(self, rank: int) -> str:
        """How a rank whose wire has closed came to its end. Waits a moment for it."""

    @abc.abstractmethod
    def reap(self) -> None:
        """Wait for the ends of all whose life is ours; their wires are closed."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End all at once, and give everything back: after an error before the first step."""

    def start(self, config: Config, own_pages: Sequence[int]) -> tuple[int, ...]:
        """Say what to load. The pages that every rank can have, this one (`own_pages`) included.

        Raises ConfigError or EngineDead if a rank cannot.
        """
        self._tell(RankStart(config))
        others = range(1, len(self.wires) + 1)
        pages = [own_pages, *(self._await(rank, RankHello).pages for rank in others)]
        return tuple(min(counts) for counts in zip(*pages, strict=True))

    def place(
        self, layouts: Sequence[PageLayout], host_pages: tuple[int, ...], max_running: int
    ) -> RankPlace:
        """Say how large the pools are, let the ranks load, and take rank 0's place."""
        if self._own is not None:
            size_memory(self._own, layouts, max_running)  # before they map it
        device = tuple(layout.num_pages for layout in layouts)
        self._tell(RankPages(device, host_pages))
        self._place = self._take_place(max_running)
        return self._place

    def wait_ready(self, own: LoadedWorker) -> None:
        """Return when all have loaded what rank 0 has. Raises ConfigError or EngineDead if not."""
        mine = RankReady(own.kernels, own.weight_bytes)
        for rank in range(1, len(self.wires) + 1):
            theirs = self._await(rank, RankReady)
            if theirs != mine:
                raise ConfigError(f"rank {rank} has loaded {theirs}, but rank 0 {mine}")

    def _take_place(self, max_running: int) -> RankPlace:  # noqa: ARG002 - a seat has its size
        """Rank 0's place; the others take theirs meanwhile."""
        assert self._own is not None, "who has no seat takes a place of another kind"
        return self._own.take()

    def _leave_place(self) -> None:
        if self._place is not None:
            self._place.leave()
        elif self._own is not None:
            self._own.close()

    def _tell(self, message: ToRank) -> None:
        frame = packed(message)
        for wire in self.wires:
            with contextlib.suppress(OSError):  # its end shows where it is waited for
                wire.send(frame)

    def _await(self, rank: int, kind: type[MessageT]) -> MessageT:
        message = receive(self.wires[rank - 1], kind)
        if message is None:
            raise EngineDead(f"rank {rank} failed while it was loading: {self.end_of(rank)}")
        return message
