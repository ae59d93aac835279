"""Ranks that share no memory, as threads: what each of them holds, put together."""

from __future__ import annotations

import unittest.mock
from pathlib import Path
from typing import Any

from phloem.core.mesh import Mesh, ShardAxis
from phloem.core.refs import owner_of
from phloem.pools import DevicePool
from phloem.worker import (
    LoadedWorker,
    RankPlace,
    WorkerOptions,
    load_local_ranks,
    load_worker,
    local_ranks,
)

__all__ = ["RanksApart"]


class RanksApart:
    """Once they are loaded: the pools of all of them, which no worker sees."""

    def __init__(self) -> None:
        self._pools: dict[int, tuple[DevicePool, ...]] = {}  # by rank
        self._axis: ShardAxis | None = None

    def load(self, path: Path, options: WorkerOptions, mesh: Mesh, **more: Any) -> LoadedWorker:
        """As `load_local_ranks`."""
        with unittest.mock.patch.object(local_ranks, "load_worker", self._load_one):
            return load_local_ranks(path, options, mesh.cp, tp=mesh.tp, maps_pools=False, **more)

    def _load_one(self, path: Path, options: WorkerOptions, *, place: RankPlace) -> LoadedWorker:
        loaded = load_worker(path, options, place=place)
        self._axis, self._pools[place.peers.rank] = place.axis, loaded.pools
        return loaded

    def read_page(self, ref: int, component: int = 0) -> bytes:
        """The parts of a page, which lie with the ranks of its owner."""
        axis = self._axis
        assert axis is not None, "nothing is loaded"
        ranks = [rank for rank in sorted(self._pools) if axis.owner_of(rank) == owner_of(ref)]
        assert len(ranks) == axis.ranks_per_owner
        return b"".join(self._pools[rank][component].read(ref) for rank in ranks)
