"""Ranks that somebody else has started, on this machine or others: they come by themselves.

Their lives are not the leader's business. Each ends when its wire closes, and whoever started it
learns how.
"""

from __future__ import annotations

from dataclasses import replace

from phloem.config.launch import Launch
from phloem.core.errors import EngineDead
from phloem.core.mesh import ShardAxis
from phloem.engine.apart import Rendezvous, place_apart
from phloem.engine.meeting import Meeting, open_store
from phloem.engine.rank_seats import rank_seats
from phloem.engine.rank_talk import RankTalk
from phloem.engine.seat_passing import send_seat
from phloem.transfer import PageLink
from phloem.worker import RankPlace, Wire
from phloem.worker.peers import PATIENCE_S

__all__ = ["JoinedRanks", "SeatedRanks"]


class JoinedRanks(RankTalk):
    """Ranks 1 ... size - 1, and the place of rank 0, which runs on `device`. Owns the wires."""

    _seated: bool = False  # whether ranks share memory

    def __init__(self, launch: Launch, timeout_s: float, axis: ShardAxis, device: str) -> None:
        """Wait until all have joined. Raises ConfigError or EngineDead if they do not."""
        self._axis = axis
        meeting = Meeting(launch, open_store(launch, timeout_s), seated=self._seated)
        self._rendezvous = Rendezvous.of_launch(
            launch, meeting.store, meeting.address, timeout_s=timeout_s, device=device
        )
        self._socks = meeting.gather(timeout_s)
        self._wires = [Wire(sock) for sock in self._socks]
        self._links = tuple(
            PageLink(sock, rank=rank, lost=wire.shut, patience_s=PATIENCE_S)
            for rank, (sock, wire) in enumerate(zip(meeting.pages, self._wires, strict=False), 1)
        )

    @property
    def wires(self) -> list[Wire]:
        return self._wires

    def _take_place(self, max_running: int) -> RankPlace:
        if self._own is not None:
            return super()._take_place(max_running)
        place = place_apart(self._rendezvous, self._axis, max_running)
        return replace(place, links=self._links)

    def end_of(self, rank: int) -> str:  # noqa: ARG002 - all of them are elsewhere
        return "its connection has closed"

    def reap(self) -> None:
        """They end by themselves."""

    def kill(self) -> None:
        for wire in self._wires:
            wire.shut()
            wire.close()
        for link in self._links:
            link.close()
        self._leave_place()


class SeatedRanks(JoinedRanks):
    """All of them on this machine: they share memory, as those do that the leader starts."""

    _seated = True

    def __init__(
        self, launch: Launch, timeout_s: float, axis: ShardAxis, num_components: int
    ) -> None:
        """As `JoinedRanks`, and everybody has a seat."""
        super().__init__(launch, timeout_s, axis, "cpu")
        self._own, *seats = rank_seats(axis, num_components)
        try:
            for sock, seat in zip(self._socks, seats, strict=True):
                send_seat(sock, seat)
        except OSError as error:
            self.kill()
            raise EngineDead(f"a rank has left before it had its seat: {error}") from None
        finally:
            for seat in seats:
                seat.close()
