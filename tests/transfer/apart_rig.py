"""Three ranks that share no memory, and an engine that moves the pages of all.

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
from phloem.core.refs import make_ref
from phloem.core.transfer import LayerGate, Transfer, TransferKind, TransferResult
from phloem.pools import DevicePool, HostArena
from phloem.transfer import (
    LeaderGate,
    PageLink,
    PageServer,
    TransferEngine,
    TransferHooks,
    memory_of,
    tell_loads,
)
from tests.transfer.rig import PATIENCE_S, layout

__all__ = ["HOST_PAGES", "LAYERS", "NUM_RANKS", "PAGES", "ApartRig"]

NUM_RANKS, PAGES, HOST_PAGES = 3, 5, 12
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
    ) -> None:
        """`chunk_bytes`: 1: a page, or a layer."""
        self.lost: list[int] = []  # ranks whose links have broken
        self.pools = [
            [
                DevicePool(_layout(c, PAGES), device=torch.device("cpu"), first_owner=rank)
                for c in range(len(LAYERS))
            ]
            for rank in range(NUM_RANKS)
        ]
        self.arenas = [HostArena(_layout(c, HOST_PAGES), arena_id=c) for c in range(len(LAYERS))]
        pairs = [socket.socketpair() for _ in range(1, NUM_RANKS)]
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
            memory_of(pool, arena, LAYERS[c], component=c, links=self.links)
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
        """`device`: (rank, slot) each."""
        self._next_id += 1
        refs = [make_ref(rank, slot) for rank, slot in device]
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
