"""The process of one rank: `python -m phloem.engine.rank_process --socket FD --seat JSON`, or
`--apart JSON` if it shares no memory with the others.

    reader thread    records and cancellations, the replica of the cache
    main thread      the model
    watch thread     ends the process soon after the leader has gone, whatever the others do

The leader owns the life of this process: it ends when the wire closes. Terminal signals are the
front's business.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import logging
import os
import select
import signal
import socket
import threading
import traceback
from collections.abc import Callable

from phloem.cache.placement import make_placement, placed_pools
from phloem.cache.state import CacheState
from phloem.config import Config, TierOptions
from phloem.core.errors import ConfigError, EngineDead
from phloem.engine.apart_seat import ApartSeat
from phloem.engine.build import worker_options
from phloem.engine.build_pools import Pools, plan_pools, resolve_dtype
from phloem.engine.loop_core import window_config
from phloem.engine.models import resolve_model
from phloem.engine.rank_messages import (
    RankFailed,
    RankHello,
    RankPages,
    RankReady,
    RankStart,
    receive_start,
)
from phloem.engine.rank_seats import RankSeat
from phloem.replica import RecordReader
from phloem.transfer import PageLink
from phloem.worker import Follower, Hooks, RankPlace, Wire, load_worker, packed

__all__ = ["RankProcess", "main", "watch_leader"]

logger = logging.getLogger(__name__)

_ORPHAN_GRACE_S = 2.0


def watch_leader(fd: int) -> threading.Event:
    """From now on this process ends soon after the socket `fd` has closed: a step or a load that
    does not end must not outlive the leader. Not once the event is set."""
    over = threading.Event()
    threading.Thread(target=_watch, args=(fd, over), name="watch", daemon=True).start()
    return over


def _watch(fd: int, over: threading.Event) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.poll()
    if not over.wait(_ORPHAN_GRACE_S):
        logger.warning("the leader is gone, and this rank does not end by itself")
        os._exit(1)


class RankProcess:
    """Loads and serves one rank. `take`: its place, once the leader has said how large pools are,
    given the settings and the pools; `ranks_here` and `local_rank`: as of `plan_pools`."""

    def __init__(
        self,
        wire: Wire,
        rank: int,
        take: Callable[[Config, Pools], RankPlace],
        *,
        local_rank: int,
        ranks_here: int | None = None,
    ) -> None:
        self._wire, self._rank, self._take = wire, rank, take
        self._local_rank, self._ranks_here = local_rank, ranks_here

    def run(self) -> int:
        """Serve until the leader closes the wire; the exit status."""
        try:
            failure = self._load().serve()
        except EngineDead:
            return 1
        except ConfigError as error:
            return self._fail(str(error), config=True)
        except Exception as error:  # a process's entry point: the leader must hear of it in a line
            logger.error("rank %d failed\n%s", self._rank, traceback.format_exc())
            text = f"rank {self._rank} failed: {type(error).__name__}: {error}"
            return self._fail(text, config=False)
        return 0 if failure is None else 1

    def _load(self) -> Follower:
        config = receive_start(self._wire, RankStart).config
        logging.basicConfig(
            level=config.runtime.log_level.upper(),
            format=f"%(asctime)s %(levelname)s rank {self._rank}: %(message)s",
        )
        model = resolve_model(config.model.model)
        dtype = resolve_dtype(config, model.path)
        # The leader has the host tier, and has looked whether its machine has room for it.
        pools = plan_pools(
            dataclasses.replace(config, tiers=TierOptions(host_memory="0")),
            model.path,
            dtype,
            ranks_here=self._ranks_here,
            local_rank=self._local_rank,
        )
        self._wire.send(packed(RankHello(pools.device)))
        sizes = receive_start(self._wire, RankPages)
        pools = pools.resized(device=sizes.device, host=sizes.host)
        no_host = pools.resized(host=(0,) * len(pools.host))
        options = worker_options(config, Hooks(), dtype, no_host, inline=True)
        place = self._take(config, pools)
        loaded = load_worker(model.path, options, place=place)
        follower = Follower(self._rank, self._wire, loaded, _replica(config, pools))
        gc.collect()
        gc.freeze()
        self._wire.send(packed(RankReady(loaded.kernels, loaded.weight_bytes)))
        return follower

    def _fail(self, message: str, *, config: bool) -> int:
        with contextlib.suppress(OSError):
            self._wire.send(packed(RankFailed(message, config)))
        return 2 if config else 1


def _replica(config: Config, pools: Pools) -> RecordReader:
    """This rank's copy of the cache, as the leader's begins."""
    page_size, num_owners = config.page_size, pools.axis.size
    num_pages, window = placed_pools(
        make_placement(config.parallel.placement),
        (pools.device[0],) * num_owners,
        window_config(pools.window, num_owners=num_owners, page_size=page_size),
    )
    state = CacheState(page_size, num_pages, host_pages=pools.host[0], window=window)
    return RecordReader(state)


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description="Started by Phloem itself, not by hand.")
    parser.add_argument("--socket", type=int, required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(RankSeat.FLAG, type=RankSeat.from_json)
    where.add_argument(ApartSeat.FLAG, type=ApartSeat.from_json)
    args = parser.parse_args()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    watch_leader(args.socket)
    wire = Wire(socket.socket(fileno=args.socket))
    seat: RankSeat | ApartSeat = args.seat or args.apart

    def take(config: Config, pools: Pools) -> RankPlace:
        if isinstance(seat, RankSeat):
            return seat.take()
        timeout_s = config.parallel.join_timeout_s
        try:
            place = seat.take(pools.runs_on, config.scheduler.max_running, timeout_s)
        except EngineDead as error:  # the leader sees only that this rank does not come
            logger.error("%s", error)
            raise
        link = PageLink(socket.socket(fileno=seat.pages), rank=0, lost=wire.shut)
        return dataclasses.replace(place, links=(link,))

    return RankProcess(wire, seat.rank, take, local_rank=seat.rank).run()


if __name__ == "__main__":
    status = main()
    # Threads of libraries may still run; all that has to be closed in order has been.
    logging.shutdown()
    os._exit(status)
