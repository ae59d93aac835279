"""The other ranks as the leader sees them: started, watched and ended.

One process each. It ends by itself when its wire closes, so nothing is left behind however the
leader ends; and a rank that dies closes its wire and its doorbells, which the leader and the others
see at once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from phloem.core.mesh import ShardAxis
from phloem.engine.apart_seat import ApartSeat
from phloem.engine.rank_seats import RankSeat, rank_seats
from phloem.engine.rank_talk import RankTalk
from phloem.worker import Wire

__all__ = ["Ranks", "StartedRanks"]

logger = logging.getLogger(__name__)

END_GRACE_S = 3.0  # a rank that runs gives up at its next layer
_EXIT_S = 1.0  # from a closed wire to an exit status


@dataclass(frozen=True, slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    wire: Wire


class StartedRanks(RankTalk):
    """All ranks of a mesh but rank 0. Owns the processes until `reap`."""

    def __init__(self, seats: Sequence[RankSeat | ApartSeat]) -> None:
        """Start a process for each seat, from rank 1 on; they wait for `start`."""
        self._ranks: dict[int, _Rank] = {}
        try:
            for rank, seat in enumerate(seats, 1):
                self._ranks[rank] = _spawn(rank, seat)
        except BaseException:  # no process, and no seat
            self.kill()
            raise

    @property
    def wires(self) -> list[Wire]:
        return [rank.wire for rank in self._ranks.values()]

    def end_of(self, rank: int) -> str:
        process = self._ranks[rank].process
        try:
            code = process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return "its connection has closed"
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with status {code}"

    def reap(self, grace_s: float = END_GRACE_S) -> None:
        """Wait for the ends of all, whose wires are closed; kill what is left after `grace_s`."""
        deadline_s = time.monotonic() + grace_s
        for rank, each in self._ranks.items():
            try:
                each.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("rank %d does not end; killing it", rank)
                each.process.kill()
                each.process.wait()

    def kill(self) -> None:
        for each in self._ranks.values():
            each.process.kill()
            each.process.wait()
            each.wire.close()
        self._leave_place()


class Ranks(StartedRanks):
    """They share memory; rank 0's seat is here."""

    def __init__(self, axis: ShardAxis, num_components: int) -> None:
        """As `StartedRanks`."""
        self._own, *seats = rank_seats(axis, num_components)
        try:
            super().__init__(seats)
        finally:
            for seat in seats:
                seat.close()


def _spawn(rank: int, seat: RankSeat | ApartSeat) -> _Rank:
    ours, theirs = socket.socketpair()
    # The child finds modules exactly where this process does; see `EngineProcess`.
    search = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    command = [sys.executable, "-P", "-m", "phloem.engine.rank_process"]
    command += ["--socket", str(theirs.fileno()), seat.FLAG, seat.to_json()]
    try:
        process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(), *seat.fds),
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": search},
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    logger.debug("rank %d is process %d", rank, process.pid)
    return _Rank(process, Wire(ours))
