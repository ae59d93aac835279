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
from phloem.core.mesh import Mesh, ShardAxis
from phloem.groups import Link, LinkedGroup, LocalGroup, local_groups, local_progress
from phloem.pools import DevicePool
from phloem.transfer import PageLink
from phloem.worker.follower import Follower, NoReplica, Replica
from phloem.worker.load import LoadedWorker, WorkerOptions, kv_dtype_of, load_worker
from phloem.worker.pages import kv_specs, page_counts, pool_layouts
from phloem.worker.peers import Peers, RankPlace, group_place
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
    tp: int = 1,
    hooks: Callable[[int], Hooks] | None = None,
    replicas: Callable[[int], Replica] | None = None,
    link: Link | None = None,
    maps_pools: bool = True,
) -> LoadedWorker:
    """Load a checkpoint `size` times, each time in `tp` parts; `worker` of the result is a
    RankedWorker over all of them.

    Pages, host tier and page counts of the result are the leader's: `pools` hold the pages of all
    ranks. `hooks(rank)`: of each rank, instead of those in `options`. `link`: pages and queries
    that travel between ranks go over it. `maps_pools`: whether they share memory, as on one
    machine; if not, each has memory of its own alone, and no plan may read others' pages in place.
    Close the worker.
    """
    axis, pools, sampled = _memory(path, options, Mesh(tp=tp, cp=size))
    links: dict[int, tuple[PageLink, ...]] = {}  # by rank
    if maps_pools:
        places = _places(axis, link, pools, sampled)
    else:
        places = _places_apart(axis, link, options.max_running)

    def load(rank: int, options: WorkerOptions) -> LoadedWorker:
        own = options if hooks is None else replace(options, hooks=hooks(rank))
        place = replace(places[rank], links=links.get(rank, ()))
        return load_worker(path, own, place=place)

    alone = replace(options, host_pages=0, window_host_pages=None, transfer_hooks=None, inline=True)
    wires = []
    for rank in range(1, axis.mesh.world):
        wire, theirs = map(Wire, socket.socketpair())
        if not maps_pools:
            ours, its = _link(rank, wire, theirs)
            links |= {0: (*links.get(0, ()), ours), rank: (its,)}
        replica = NoReplica() if replicas is None else replicas(rank)
        follower = Follower(rank, theirs, load(rank, alone), replica)
        threading.Thread(target=follower.serve, name=f"phloem-rank{rank}").start()
        wires.append(wire)
    loaded = load(0, options)
    assert not isinstance(loaded.worker, RankedWorker), "one rank's own"
    return replace(loaded, worker=RankedWorker(loaded.worker, wires))


def _places(
    axis: ShardAxis, link: Link | None, pools: tuple[mmap.mmap, ...], sampled: mmap.mmap
) -> list[RankPlace]:
    """Of ranks that share this memory."""
    groups, rows = _groups(axis)
    return [
        RankPlace(
            peers=Peers(board),
            axis=axis,
            pools=pools,
            sampled=sampled,
            group=_linked(groups[rank], link),
            row=rows.get(rank),
        )
        for rank, board in enumerate(local_progress(axis.mesh.world))
    ]


def _places_apart(axis: ShardAxis, link: Link | None, max_running: int) -> list[RankPlace]:
    """Of ranks that share none."""
    groups, rows = _groups(axis)
    return [
        group_place(
            _linked(world, link),
            axis,
            max_running,
            parts=_linked(groups[rank], link) if axis.size > 1 else None,
            row=rows.get(rank),
        )
        for rank, world in enumerate(local_groups(axis.mesh.world, axis="mesh"))
    ]


def _linked(group: LocalGroup, link: Link | None) -> LocalGroup | LinkedGroup:
    return group if link is None else LinkedGroup(group, link)


def _groups(axis: ShardAxis) -> tuple[dict[int, LocalGroup], dict[int, LocalGroup]]:
    """By rank: the group of its peers, and that of its row, if more than one rank is in it."""
    mesh = axis.mesh
    groups: dict[int, LocalGroup] = {}
    rows: dict[int, LocalGroup] = {}
    for part in range(axis.ranks_per_owner):
        ranks = axis.peers_of(part)
        groups |= zip(ranks, local_groups(len(ranks), members=ranks), strict=True)
    for first in range(0, mesh.world if mesh.tp > 1 else 0, mesh.tp):
        ranks = mesh.row_of(first)
        rows |= zip(ranks, local_groups(mesh.tp, axis="tp", members=ranks), strict=True)
    return groups, rows


def _link(rank: int, wire: Wire, theirs: Wire) -> tuple[PageLink, PageLink]:
    """For pages of tiers between the leader and a rank: both ends."""
    ours, its = socket.socketpair()
    return PageLink(ours, rank=rank, lost=wire.shut), PageLink(its, rank=0, lost=theirs.shut)


def _memory(
    path: Path, options: WorkerOptions, mesh: Mesh
) -> tuple[ShardAxis, tuple[mmap.mmap, ...], mmap.mmap]:
    """Who owns pages, and what the ranks share: pools of each component, the sampled tokens."""
    dtype = kv_dtype_of(options)
    specs = kv_specs(read_model_config(path), dtype=dtype, page_size=options.page_size)
    counts = page_counts(
        specs,
        num_pages=options.num_pages,
        window_pages=options.window_pages,
        kv_bytes=options.kv_bytes,
    )
    axis = specs[0].shard_axis(mesh)
    pools = tuple(
        mmap.mmap(-1, DevicePool.shared_bytes(layout, axis.size) or 1)
        for layout in pool_layouts(specs, counts)
    )
    return axis, pools, mmap.mmap(-1, SampledTokens.num_bytes(options.max_running))
