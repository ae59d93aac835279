"""A rank that somebody else has started, such as torchrun: it finds the leader, and serves it.

The same process as a rank that the leader starts (`engine.rank_process`), but for how it gets its
wire and its place.
"""

from __future__ import annotations

import dataclasses
import logging
import signal

from phloem.config import Config
from phloem.config.launch import Launch
from phloem.core.errors import EngineDead
from phloem.engine.apart import Rendezvous, place_apart
from phloem.engine.build_pools import Pools
from phloem.engine.meeting import Met, find_leader, open_store
from phloem.engine.rank_process import RankProcess, watch_leader
from phloem.engine.seat_passing import receive_seat
from phloem.transfer import PageLink
from phloem.worker import RankPlace, Wire

__all__ = ["serve_rank"]

logger = logging.getLogger(__name__)


def serve_rank(launch: Launch, timeout_s: float) -> int:
    """Serve one rank until the leader ends; the exit status. For the main thread of a process.

    Raises EngineDead if there is no leader for `timeout_s`, or if it does not take this rank.
    """
    met = find_leader(launch, open_store(launch, timeout_s), timeout_s)
    # From here on the leader says when it is over: on SIGTERM it drains first.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    over = watch_leader(met.sock.fileno())
    try:
        return _serve(launch, met, timeout_s)
    finally:
        over.set()


def _serve(launch: Launch, met: Met, timeout_s: float) -> int:
    seat = None
    if met.seated:
        try:
            seat = receive_seat(met.sock)
        except OSError as error:
            raise EngineDead(f"rank {launch.rank} has got no seat: {error}") from None

    def take(config: Config, pools: Pools) -> RankPlace:
        if seat is not None:
            return seat.take()
        at = Rendezvous.of_launch(
            launch, met.store, met.address, timeout_s=timeout_s, device=pools.runs_on
        )
        try:
            place = place_apart(at, pools.axis, config.scheduler.max_running)
        except EngineDead as error:  # the leader sees only that this rank does not come
            logger.error("%s", error)
            raise
        assert met.pages is not None, "pages travel where memory is not shared"
        link = PageLink(met.pages, rank=0, lost=wire.shut)
        return dataclasses.replace(place, links=(link,))

    wire = Wire(met.sock)
    status = RankProcess(
        wire, launch.rank, take, local_rank=launch.local_rank, ranks_here=launch.local_size
    ).run()
    if status:
        logger.error("this rank ends with status %d; rank 0 or what ran it says why", status)
    return status
