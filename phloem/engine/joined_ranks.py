"""Ranks that somebody else has started, on this machine or others: they come by themselves.

Their lives are not the leader's business. Each ends when its wire closes, and whoever started it
learns how.
"""

from __future__ import annotations

from dataclasses import replace

from torch._C._distributed_c10d import Store

from phloem.config.launch import Launch
from phloem.core.errors import EngineDead, GroupError
from phloem.core.mesh import ShardAxis
from phloem.engine.meeting import Meeting, open_store
from phloem.engine.rank_seats import rank_seats
from phloem.engine.rank_talk import RankTalk
from phloem.engine.seat_passing import send_seat
from phloem.groups import TorchGroup
from phloem.transfer import PageLink
from phloem.worker import RankPlace, Wire
from phloem.worker.peers import PATIENCE_S, group_place

__all__ = ["JoinedRanks", "SeatedRanks", "met_group"]


class JoinedRanks(RankTalk):
    """Ranks 1 ... size - 1, and the place of rank 0. Owns the wires."""

    def __init__(self, launch: Launch, timeout_s: float, axis: ShardAxis) -> None:
        """Wait until all have joined. Raises ConfigError or EngineDead if they do not."""
        self._launch, self._timeout_s, self._axis = launch, timeout_s, axis
        meeting = Meeting(launch, open_store(launch, timeout_s))
        self._store, self._address = meeting.store, meeting.address
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
        group = met_group(self._launch, self._store, self._address, self._timeout_s)
        place = group_place(group, self._axis, max_running)
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

    def __init__(
        self, launch: Launch, timeout_s: float, axis: ShardAxis, num_components: int
    ) -> None:
        """As `JoinedRanks`, and everybody has a seat."""
        super().__init__(launch, timeout_s, axis)
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


def met_group(launch: Launch, store: Store, address: str, timeout_s: float) -> TorchGroup:
    """What all exchange over, once they have met; others reach this rank at `address`.

    Blocks until all are here. Raises EngineDead if they are not for `timeout_s`.
    """
    try:
        return TorchGroup.gloo(
            store,
            rank=launch.rank,
            size=launch.size,
            timeout_s=PATIENCE_S,
            meet_s=timeout_s,
            address=address,
        )
    except GroupError as error:
        raise EngineDead(str(error)) from None
