"""A small pool, an arena and an engine over them; page bytes that follow from their names."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from phloem.core.clock import MonotonicClock
from phloem.core.transfer import Transfer, TransferKind, TransferResult
from phloem.kv.keys import LINK_BYTES
from phloem.kv.layout import PageLayout
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.pools import DevicePool, HostArena
from phloem.transfer import ComponentMemory, TransferEngine, TransferHooks
from phloem.transfer.copier import CpuCopier
from phloem.transfer.native_copy import SegmentCopy

PATIENCE_S = 60.0  # of a test, on a busy machine
NUM_LAYERS = 3


def layout(num_pages: int, dtype: KVDtype = KVDtype.FP32) -> PageLayout:
    """Four KV heads in two groups, three layers."""
    spec = KVSpec(
        kind=AttentionKind.GQA,
        dtype=dtype,
        num_layers=NUM_LAYERS,
        num_kv_heads=4,
        head_dim=16 if dtype is KVDtype.FP4 else 6,  # which has a scale for 16 numbers
        page_size=5,
    )
    return PageLayout(spec, num_pages, 2)


class Rig:
    """An engine and the memory on both sides. Closes at the end; no thread may be left."""

    def __init__(
        self,
        *,
        device_pages: int = 8,
        host_pages: int = 12,
        dtype: KVDtype = KVDtype.FP32,
        hooks: TransferHooks | None = None,
        native: bool = False,
    ) -> None:
        if native and not SegmentCopy.available():
            pytest.skip("the native kernels are not built")
        self.pool = DevicePool(layout(device_pages, dtype), device=torch.device("cpu"))
        self.arena = HostArena(layout(host_pages, dtype))
        self.clock = MonotonicClock()
        copier = CpuCopier(self.pool, self.arena, native=native)
        memory = ComponentMemory(self.arena, copier, tuple(range(NUM_LAYERS)))
        self.engine = TransferEngine([memory], self.clock, hooks=hooks)
        self.results: dict[int, TransferResult] = {}
        self.released: list[int] = []
        self._next_id = 0

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        assert "phloem-transfer" not in {t.name for t in threading.enumerate()}

    def page(self, name: int) -> bytes:
        """The bytes that a page of this name holds."""
        return random.Random(name).randbytes(self.arena.layout.spec.page_bytes)

    def fill_device(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.pool.write_page(slot, self.page(slot))

    def fill_host(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.arena.write_page(slot, self.page(1000 + slot))

    def submit(
        self,
        kind: TransferKind,
        device: Sequence[int] = (),
        host: Sequence[int] = (),
        **more: object,
    ) -> int:
        self._next_id += 1
        self.engine.submit(
            Transfer(
                id=self._next_id,
                kind=kind,
                device=np.array(device, dtype=np.int64),
                host=np.array(host, dtype=np.int64),
                **more,  # type: ignore[arg-type]
            )
        )
        return self._next_id

    def pump(self, timeout_s: float = 0.0) -> None:
        if timeout_s:
            self.engine.wait(timeout_s)
        for result in self.engine.poll():
            assert result.id not in self.results, "a transfer has one result"
            self.results[result.id] = result
        self.released += self.engine.released()

    def finish(self, transfer_id: int) -> TransferResult:
        """Wait for its result."""
        end_s = self.clock.now_s() + PATIENCE_S
        while transfer_id not in self.results:
            assert self.clock.now_s() < end_s, f"transfer {transfer_id} has no result"
            self.pump(1.0)
        return self.results[transfer_id]


def link(name: int) -> bytes:
    """A content link of this name."""
    return random.Random(f"link {name}").randbytes(LINK_BYTES)
