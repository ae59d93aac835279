"""Two components in one engine: memories that do not mix, layers in the model's order, no bytes."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from phloem.core.clock import MonotonicClock
from phloem.core.transfer import Transfer, TransferKind, TransferResult
from phloem.kv.layout import PageLayout
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.pools import DevicePool, HostArena
from phloem.stores import guarded
from phloem.stores.adapters.memory import MemoryBackend
from phloem.transfer import ComponentMemory, TransferEngine, TransferHooks, memory_of
from tests.transfer.rig import PATIENCE_S, link

BACKUP, LOAD = TransferKind.BACKUP_HOST, TransferKind.LOAD_BACK
FULL_LAYERS, WINDOW_LAYERS = (2, 5), (0, 1, 3, 4)


def spec_of(num_layers: int, window: int | None = None) -> KVSpec:
    return KVSpec(
        kind=AttentionKind.GQA,
        dtype=KVDtype.FP32,
        num_layers=num_layers,
        num_kv_heads=2,
        head_dim=3,
        page_size=4,
        retention=window,
    )


class Pair:
    """An engine with a full and a window component; bytes follow from (component, side, slot)."""

    def __init__(self, *, full=FULL_LAYERS, window=WINDOW_LAYERS, hooks=None) -> None:
        specs = spec_of(len(full)), spec_of(len(window), 8)
        self.pools = [
            DevicePool(PageLayout(spec, 6, 2), device=torch.device("cpu"))
            if spec.num_layers
            else None
            for spec in specs
        ]
        self.arenas = [
            HostArena(PageLayout(spec, count, 2), arena_id=index)
            for index, (spec, count) in enumerate(zip(specs, (9, 7), strict=True))
        ]
        self.memories = [
            memory_of(pool, arena, layers)
            for pool, arena, layers in zip(self.pools, self.arenas, (full, window), strict=True)
        ]
        self.clock = MonotonicClock()
        self.engine = TransferEngine(self.memories, self.clock, hooks=hooks)
        self._ids = 0

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def data(self, component: int, side: str, slot: int) -> bytes:
        size = self.arenas[component].layout.spec.page_bytes
        return random.Random(f"{component} {side} {slot}").randbytes(size)

    def fill(self) -> None:
        for component, (pool, arena) in enumerate(zip(self.pools, self.arenas, strict=True)):
            for slot in range(6 if pool else 0):
                pool.write_page(slot, self.data(component, "device", slot))
            for slot in range(arena.num_pages):
                arena.write_page(slot, self.data(component, "host", slot))

    def submit(self, kind, component, device=(), host=(), **more) -> int:
        self._ids += 1
        self.engine.submit(
            Transfer(
                id=self._ids,
                kind=kind,
                component=component,
                device=np.array(device, dtype=np.int64),
                host=np.array(host, dtype=np.int64),
                **more,
            )
        )
        return self._ids

    def finish(self, *ids: int) -> dict[int, TransferResult]:
        found: dict[int, TransferResult] = {}
        while set(ids) - set(found):
            self.engine.wait(PATIENCE_S)
            found |= {result.id: result for result in self.engine.poll()}
        return found


def test_pages_of_a_component_move_in_its_own_memory_only():
    """Equal slots of both components hold other pages: `component` alone picks the memory."""
    with Pair() as pair:
        pair.fill()
        for component, other in ((0, 1), (1, 0)):
            before = pair.arenas[other].bytes.tobytes()
            done = pair.submit(BACKUP, component, [1, 4], [6, 2])
            result = pair.finish(done)[done]
            spec = pair.arenas[component].layout.spec
            assert result.num_bytes == 2 * spec.page_bytes
            assert pair.arenas[component].read_page(6) == pair.data(component, "device", 1)
            assert pair.arenas[other].bytes.tobytes() == before
            untouched = [pair.pools[other].read_page(slot) for slot in range(6)]
            pair.finish(pair.submit(LOAD, component, [5], [3]))
            assert pair.pools[component].read_page(5) == pair.data(component, "host", 3)
            assert [pair.pools[other].read_page(slot) for slot in range(6)] == untouched


class Steps:
    """Lets the copy thread make one chunk at a time."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, int]] = []
        self._arrived = threading.Semaphore(0)
        self._go = threading.Semaphore(0)

    def before_chunk(self, transfer: Transfer, position: int) -> None:
        self.chunks.append((transfer.id, position))
        self._arrived.release()
        assert self._go.acquire(timeout=PATIENCE_S)

    def await_chunk(self) -> None:
        assert self._arrived.acquire(timeout=PATIENCE_S)

    def go(self, times: int = 1) -> None:
        self._go.release(times)


def test_loads_of_two_components_bring_layers_in_the_models_order():
    """Model layers 0 1 [2] 3 4 [5]: the window's two first, then the full one's first, ..."""
    steps = Steps()
    with Pair(hooks=TransferHooks(before_chunk=steps.before_chunk, whole_layers=True)) as pair:
        blocker = pair.submit(LOAD, 1, [0], [0])
        steps.await_chunk()
        full = pair.submit(LOAD, 0, [1], [1])
        window = pair.submit(LOAD, 1, [1], [1])
        steps.go(100)
        pair.finish(blocker, full, window)
        both = [chunk for chunk in steps.chunks if chunk[0] != blocker]
        assert both == [(window, 0), (window, 1), (full, 0), (window, 2), (window, 3), (full, 1)]


def test_a_layer_waits_for_the_loads_of_its_own_component_only():
    """Two loads of one request: after the window's first layer, layer 0 may go on, layer 1 not."""
    steps = Steps()
    with Pair(hooks=TransferHooks(before_chunk=steps.before_chunk, whole_layers=True)) as pair:
        full = pair.submit(LOAD, 0, [1], [1], after_step=5)  # stands still for now
        window = pair.submit(LOAD, 1, [1], [1])
        steps.await_chunk()
        steps.go()  # layer 0 of the model
        steps.await_chunk()
        pair.engine.wait_layer((full, window), 0)  # returns, though nothing of `full` has moved
        waits = [
            threading.Thread(target=pair.engine.wait_layer, args=((full, window), layer))
            for layer in (1, 2)
        ]
        for thread in waits:
            thread.start()
        waits[0].join(0.05)
        assert waits[0].is_alive()
        steps.go(3)  # the window's other layers
        pair.finish(window)
        waits[0].join(PATIENCE_S)
        assert not waits[0].is_alive()
        waits[1].join(0.05)
        assert waits[1].is_alive()  # layer 2 is the full component's
        steps.go(100)
        pair.engine.step_finished(5)
        waits[1].join(PATIENCE_S)
        assert not waits[1].is_alive()
        pair.finish(full)


@pytest.mark.parametrize("kind", [BACKUP, LOAD])
def test_a_spine_without_bytes_is_moved_at_once_and_holds_no_layer_up(kind):
    """A model all of whose layers have a window: its full pages are only counted."""
    with Pair(full=(), window=range(4)) as pair:
        waiting = pair.submit(LOAD, 0, [2], [2], after_step=3)
        for layer in range(4):
            pair.engine.wait_layer((waiting,), layer)
        done = pair.submit(kind, 0, [0, 5], [1, 8])
        result = pair.finish(done)[done]
        assert result.done.all()
        assert (result.num_bytes, result.error) == (0, None)
        pair.engine.step_finished(3)
        assert pair.finish(waiting)[waiting].done.all()


def test_objects_of_two_components_lie_in_storage_under_the_same_link():
    """Each has its own scope: what one put the other does not find, and gets only its own bytes."""
    links = (link(1), link(2))
    with Pair() as pair:
        pair.engine.storage.attach(guarded(MemoryBackend(1 << 20), pair.clock))
        pair.fill()
        put = pair.submit(TransferKind.BACKUP_STORAGE, 1, host=[3, 4], links=links)
        assert pair.finish(put)[put].done.all()
        probes = [pair.submit(TransferKind.PROBE, component, links=links) for component in (0, 1)]
        found = pair.finish(*probes)
        assert [found[probe].done.tolist() for probe in probes] == [[False] * 2, [True] * 2]
        put = pair.submit(TransferKind.BACKUP_STORAGE, 0, host=[5, 6], links=links)
        pair.finish(put)
        gets = [
            pair.submit(TransferKind.PREFETCH, component, host=[0, 1], links=links)
            for component in (0, 1)
        ]
        results = pair.finish(*gets)
        for component, slots in ((0, (5, 6)), (1, (3, 4))):
            assert results[gets[component]].done.all()
            size = pair.arenas[component].layout.spec.page_bytes
            assert results[gets[component]].num_bytes == 2 * size
            for slot, source in enumerate(slots):
                expected = pair.data(component, "host", source)
                assert pair.arenas[component].read_page(slot) == expected


def test_a_spine_without_bytes_is_in_any_storage_and_in_none_that_is_not_there():
    kinds = (TransferKind.BACKUP_STORAGE, TransferKind.PROBE, TransferKind.PREFETCH)
    with Pair(full=(), window=range(4)) as pair:
        for attached in (False, True):
            if attached:
                pair.engine.storage.attach(guarded(MemoryBackend(1 << 20), pair.clock))
            for kind in kinds:
                asked = pair.submit(kind, 0, host=[0], links=(link(0),))
                result = pair.finish(asked)[asked]
                assert result.done.tolist() == [attached]
                assert result.num_bytes == 0
        assert pair.engine.storage.stats().objects == 0


def test_layers_that_do_not_fit_the_component_are_refused():
    arena = HostArena(PageLayout(spec_of(2), 2, 1))
    copier = memory_of(None, HostArena(PageLayout(spec_of(0), 2, 1))).copier
    for layers in ((1,), (1, 0), (1, 1), (0, 1, 2)):
        with pytest.raises(ValueError, match="2 layers of a component"):
            ComponentMemory(arena, copier, layers)


def test_an_arena_without_bytes_has_pages_and_spans():
    arena = HostArena(PageLayout(spec_of(0), 3, 2))
    assert (arena.num_pages, arena.num_bytes) == (3, 0)
    assert arena.read_page(2) == b""
    arena.write_page(1, b"")
    assert arena.span(2, 1).length == 0
    arena.close()
