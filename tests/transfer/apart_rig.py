"""Ranks that share no memory, and an engine that moves the pages of all.

There are two components, whose layers lie among each other in the model.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from phloem.core.clock import MonotonicClock
from phloem.core.mesh import Mesh, ShardAxis
from phloem.core.refs import make_ref
from phloem.core.transfer import LayerGate, Transfer, TransferKind, TransferResult
from phloem.pools import DevicePool, HostArena
from phloem.transfer import (
    Holder,
    LeaderGate,
    PageLink,
    PageServer,
    TransferEngine,
    TransferHooks,
    memory_of,
    tell_loads,
)
from tests.transfer.rig import PATIENCE_S, layout

__all__ = ["HOST_PAGES", "LAYERS", "PAGES", "ApartRig"]

PAGES, HOST_PAGES = 5, 12
THREE = Mesh(cp=3)
LAYERS = ((0, 2, 3), (1, 4))  # of a model of five, by component


def _layout(component: int, num_pages: int):
    made = layout(num_pages)
    return replace(made, spec=replace(made.spec, num_layers=len(LAYERS[component])))


class ApartRig:
    """Close it, or use it as a context: then no thread of it may be left."""

    def __init__(
        self,
        *,
        hooks: TransferHooks | None = None,
        patience_s: float = PATIENCE_S,
        chunk_bytes: int = 1,
        mesh: Mesh = THREE,
    ) -> None:
        """`chunk_bytes`: 1: a page, or a layer. `mesh`: a row of it owns pages, each rank a part
        of their heads."""
        self.lost: list[int] = []  # ranks whose links have broken
        self.axis = axis = ShardAxis(mesh=mesh, ranks_per_owner=mesh.tp)
        self.pools = [
            [
                DevicePool(
                    _layout(c, PAGES).of_one_rank(axis),
                    device=torch.device("cpu"),
                    first_owner=axis.owner_of(rank),
                )
                for c in range(len(LAYERS))
            ]
            for rank in range(mesh.world)
        ]
        self.arenas = [HostArena(_layout(c, HOST_PAGES), arena_id=c) for c in range(len(LAYERS))]
        pairs = [socket.socketpair() for _ in range(1, mesh.world)]
        self.theirs = [PageLink(their, rank=0) for _, their in pairs]
        self.links = [
            PageLink(our, rank=rank, lost=self._lost(rank), patience_s=patience_s)
            for rank, (our, _) in enumerate(pairs, 1)
        ]
        self.servers = [
            PageServer(link, pools, LAYERS)
            for link, pools in zip(self.theirs, self.pools[1:], strict=True)
        ]
        memories = [
            memory_of(pool, arena, LAYERS[c], component=c, holders=self._holders())
            for c, (pool, arena) in enumerate(zip(self.pools[0], self.arenas, strict=True))
        ]
        self.engine = TransferEngine(
            memories,
            MonotonicClock(),
            hooks=hooks,
            chunk_bytes=chunk_bytes,
            on_loads=lambda news: tell_loads(self.links, news),
        )
        self.gates: list[LayerGate] = [LeaderGate(self.engine), *self.servers]
        self.results: dict[int, TransferResult] = {}
        self._next_id = 0

    def __enter__(self) -> ApartRig:
        return self

    def __exit__(self, *_: object) -> None:
        for link in self.links:
            link.close()
        self.engine.close()
        for thread in threading.enumerate():
            if thread.name in ("phloem-pages", "phloem-transfer"):
                thread.join(PATIENCE_S)
                assert not thread.is_alive(), thread.name

    def _holders(self) -> list[Holder]:
        layout = self.arenas[0].layout
        return [
            Holder(
                link=link,
                owner=self.axis.owner_of(rank),
                first_group=layout.groups_of(self.axis, rank)[0],
                end_group=layout.groups_of(self.axis, rank)[1],
            )
            for rank, link in enumerate(self.links, 1)
        ]

    def parts(self, page: bytes) -> list[bytes]:
        """What the ranks of its owner hold of a page."""
        size = len(page) // self.axis.ranks_per_owner
        return [page[low : low + size] for low in range(0, len(page), size)]

    def _ranks(self, owner: int) -> range:
        first = owner * self.axis.ranks_per_owner
        return range(first, first + self.axis.ranks_per_owner)

    def read_page(self, component: int, owner: int, slot: int) -> bytes:
        """Whole, of all who hold it."""
        ranks = self._ranks(owner)
        return b"".join(self.pools[rank][component].read_page(slot) for rank in ranks)

    def write_page(self, component: int, owner: int, slot: int, page: bytes) -> None:
        for rank, part in zip(self._ranks(owner), self.parts(page), strict=True):
            self.pools[rank][component].write_page(slot, part)

    def _lost(self, rank: int):
        return lambda: self.lost.append(rank)

    def submit(
        self,
        kind: TransferKind,
        device: Sequence[tuple[int, int]],
        host: Sequence[int],
        *,
        component: int = 0,
        after_step: int = -1,
    ) -> int:
        """`device`: (owner, slot) each."""
        self._next_id += 1
        refs = [make_ref(owner, slot) for owner, slot in device]
        self.engine.submit(
            Transfer(
                id=self._next_id,
                kind=kind,
                component=component,
                device=np.array(refs, dtype=np.int64),
                host=np.array(host, dtype=np.int64),
                after_step=after_step,
            )
        )
        return self._next_id

    def poll(self) -> list[TransferResult]:
        found = self.engine.poll()
        for result in found:
            assert result.id not in self.results, "a transfer has one result"
            self.results[result.id] = result
        return found

    def finish(self, transfer_id: int) -> TransferResult:
        """Wait for its result."""
        end_s = time.monotonic() + PATIENCE_S
        while transfer_id not in self.results:
            assert time.monotonic() < end_s, f"transfer {transfer_id} has no result"
            self.engine.wait(1.0)
            self.poll()
        return self.results[transfer_id]
