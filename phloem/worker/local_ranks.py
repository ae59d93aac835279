"""Several ranks as threads of one process: for tests and measurements. All else is as between
processes."""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from phloem.config.checkpoint import read_model_config
from phloem.groups import Link, LinkedGroup, local_groups, local_progress
from phloem.pools import DevicePool
from phloem.worker.follower import Follower, NoReplica, Replica
from phloem.worker.load import LoadedWorker, WorkerOptions, kv_dtype_of, load_worker
from phloem.worker.pages import kv_specs, page_counts, pool_layouts
from phloem.worker.peers import Peers, RankPlace
from phloem.worker.ranked import RankedWorker
from phloem.worker.runner import Hooks
from phloem.worker.sampled import SampledTokens
from phloem.worker.wire import Wire

__all__ = ["load_local_ranks"]


def load_local_ranks(
    path: Path,
    options: WorkerOptions,
    size: int,
    *,
    hooks: Callable[[int], Hooks] | None = None,
    replicas: Callable[[int], Replica] | None = None,
    link: Link | None = None,
) -> LoadedWorker:
    """Load a checkpoint `size` times; `worker` of the result is a RankedWorker over all of them.

    Pages, host tier and page counts of the result are the leader's: `pools` hold the pages of all
    ranks. `hooks(rank)`: of each rank, instead of those in `options`. `link`: what travels
    between ranks goes over it. Close the worker.
    """
    boards, groups = local_progress(size), local_groups(size)
    pools, sampled = _memory(path, options, size)

    def load(rank: int, options: WorkerOptions) -> LoadedWorker:
        own_group = groups[rank] if link is None else LinkedGroup(groups[rank], link)
        place = RankPlace(peers=Peers(boards[rank]), pools=pools, sampled=sampled, group=own_group)
        own = options if hooks is None else replace(options, hooks=hooks(rank))
        return load_worker(path, own, place=place)

    alone = replace(options, host_pages=0, window_host_pages=None, transfer_hooks=None, inline=True)
    wires = []
    for rank in range(1, size):
        ours, theirs = socket.socketpair()
        replica = NoReplica() if replicas is None else replicas(rank)
        follower = Follower(rank, Wire(theirs), load(rank, alone), replica)
        threading.Thread(target=follower.serve, name=f"phloem-rank{rank}").start()
        wires.append(Wire(ours))
    loaded = load(0, options)
    assert not isinstance(loaded.worker, RankedWorker), "one rank's own"
    return replace(loaded, worker=RankedWorker(loaded.worker, wires))


def _memory(
    path: Path, options: WorkerOptions, size: int
) -> tuple[tuple[mmap.mmap, ...], mmap.mmap]:
    """What the ranks share: the pools of each component, the sampled tokens."""
    dtype = kv_dtype_of(options)
    specs = kv_specs(read_model_config(path), dtype=dtype, page_size=options.page_size)
    counts = page_counts(
        specs,
        num_pages=options.num_pages,
        window_pages=options.window_pages,
        kv_bytes=options.kv_bytes,
    )
    pools = tuple(
        mmap.mmap(-1, DevicePool.shared_bytes(layout, size) or 1)
        for layout in pool_layouts(specs, counts)
    )
    return pools, mmap.mmap(-1, SampledTokens.num_bytes(options.max_running))
