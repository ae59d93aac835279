"""Copies between device and host: right bytes, in the right order, never before their time."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from phloem.core.transfer import Transfer, TransferKind
from phloem.kv.spec import KVDtype
from phloem.transfer import TransferHooks
from tests.transfer.rig import NUM_LAYERS, PATIENCE_S, Rig

BACKUP, LOAD = TransferKind.BACKUP_HOST, TransferKind.LOAD_BACK


class Gate:
    """Stops the copy thread before a chunk, until told to go on."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, int]] = []
        self._arrived = threading.Semaphore(0)
        self._go = threading.Semaphore(0)

    def before_chunk(self, transfer: Transfer, position: int) -> None:
        self.chunks.append((transfer.id, position))
        self._arrived.release()
        assert self._go.acquire(timeout=PATIENCE_S)

    def await_chunk(self) -> tuple[int, int]:
        assert self._arrived.acquire(timeout=PATIENCE_S)
        return self.chunks[-1]

    def go(self, times: int = 1) -> None:
        self._go.release(times)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.go(1000)


@pytest.mark.parametrize("dtype", list(KVDtype), ids=lambda d: d.value)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", ["numpy", "native", "layers"])
def test_pages_come_back_whole_after_a_journey_through_other_slots(dtype, seed, way):
    """Runs and single pages, up and down, on both sides; nothing else is touched."""
    rng = random.Random(seed)
    hooks = TransferHooks(whole_layers=way != "numpy")
    with Rig(dtype=dtype, native=way == "native", hooks=hooks) as rig:
        rig.fill_device(range(8))
        device = rng.sample(range(8), 5) if seed else [2, 3, 4, 7, 1]
        host = rng.sample(range(12), 5) if seed else [5, 6, 7, 9, 0]
        result = rig.finish(rig.submit(BACKUP, device, host))
        assert result.done.all()
        assert result.num_bytes == 5 * rig.arena.layout.spec.page_bytes
        for slot in range(12):
            expected = (
                rig.page(device[host.index(slot)]) if slot in host else bytes(len(rig.page(0)))
            )
            assert rig.arena.read_page(slot) == expected
        targets = rng.sample(range(8), 5)
        before = [rig.pool.read_page(slot) for slot in range(8)]
        assert rig.finish(rig.submit(LOAD, targets, host)).done.all()
        for slot in range(8):
            expected = rig.page(device[targets.index(slot)]) if slot in targets else before[slot]
            assert rig.pool.read_page(slot) == expected


def test_native_copies_refuse_slots_outside_a_pool():
    with Rig(native=True) as rig:
        result = rig.finish(rig.submit(BACKUP, [0, 8 + 1], [0, 1]))  # 8 pages and one of zeros
        assert not result.done.any()
        assert "AssertionError" in (result.error or "")


def test_o18_nothing_moves_before_the_step_it_waits_for(gate):
    """The page's content is final only after its step; what is copied is what stands there then."""
    with Rig(hooks=TransferHooks(before_chunk=gate.before_chunk)) as rig:
        late = rig.submit(BACKUP, [0], [0], after_step=3)
        early = rig.submit(BACKUP, [1], [1], after_step=2)
        rig.engine.step_finished(2)
        assert gate.await_chunk() == (early, 0)
        gate.go()
        rig.finish(early)
        rig.pump()
        assert late not in rig.results
        rig.pool.write_page(0, rig.page(77))
        rig.engine.step_finished(3)
        gate.go()
        assert rig.finish(late).done.all()
        assert rig.arena.read_page(0) == rig.page(77)


def test_a_step_that_is_told_late_takes_nothing_back(gate):
    with Rig() as rig:
        rig.engine.step_finished(5)
        rig.engine.step_finished(4)
        assert rig.finish(rig.submit(BACKUP, [0], [0], after_step=5)).done.all()


def test_a_load_overtakes_backups_between_their_chunks(gate, monkeypatch):
    monkeypatch.setattr("phloem.transfer.engine.CHUNK_BYTES", 1)
    with Rig(hooks=TransferHooks(before_chunk=gate.before_chunk)) as rig:
        backup = rig.submit(BACKUP, [0, 1], [0, 1])
        assert gate.await_chunk() == (backup, 0)
        load = rig.submit(LOAD, [2], [2])
        gate.go(100)
        rig.finish(backup)
        rig.finish(load)
        assert gate.chunks == [
            (backup, 0), (load, 0), (load, 1), (load, 2), (backup, 1),
        ]  # fmt: skip


def test_two_loads_share_the_way_layer_by_layer(gate):
    """A step that reads both can begin when layer 0 of both is there, not after all of the one."""
    with Rig(hooks=TransferHooks(before_chunk=gate.before_chunk, whole_layers=True)) as rig:
        first = rig.submit(LOAD, [0], [0])
        gate.await_chunk()
        second = rig.submit(LOAD, [1], [1])
        gate.go(100)
        rig.finish(first)
        rig.finish(second)
        assert gate.chunks == [
            (first, 0), (second, 0), (first, 1), (second, 1), (first, 2), (second, 2),
        ]  # fmt: skip


def test_a_layer_can_be_read_while_the_next_one_is_on_its_way(gate):
    with Rig(hooks=TransferHooks(before_chunk=gate.before_chunk, whole_layers=True)) as rig:
        rig.fill_host([3])
        whole = np.frombuffer(rig.page(1003), dtype=np.float32).reshape(2, NUM_LAYERS, -1)
        load = rig.submit(LOAD, [5], [3])
        for layer in range(NUM_LAYERS):
            assert gate.await_chunk() == (load, layer)
            gate.go()
            rig.engine.wait_layer((load,), layer)
            held = np.frombuffer(rig.pool.read_page(5), dtype=np.float32).reshape(whole.shape)
            assert held[:, : layer + 1].tobytes() == whole[:, : layer + 1].tobytes()
            if layer + 1 < NUM_LAYERS:
                gate.await_chunk()
                assert not held[:, layer + 1 :].any()
                gate.chunks.pop()
                gate._arrived.release()
                gate.chunks.append((load, layer + 1))
        rig.finish(load)
        rig.engine.wait_layer((load, 999), NUM_LAYERS - 1)  # long since polled: no wait


def test_a_copy_that_fails_is_reported_and_the_next_one_works():
    fail = {1}

    def before_chunk(transfer: Transfer, position: int) -> None:
        if transfer.id in fail and position == 1:
            raise OSError("injected")

    hooks = TransferHooks(before_chunk=before_chunk, whole_layers=True)
    with Rig(hooks=hooks) as rig:
        load = rig.submit(LOAD, [0, 1], [0, 1])
        rig.engine.wait_layer((load,), NUM_LAYERS - 1)  # ends, though the layer never comes
        result = rig.finish(load)
        assert not result.done.any()
        assert result.error == "OSError: injected"
        assert rig.finish(rig.submit(LOAD, [0, 1], [0, 1])).done.all()


def test_a_backup_that_fails_half_way_says_which_pages_are_there(monkeypatch):
    monkeypatch.setattr("phloem.transfer.engine.CHUNK_BYTES", 1)

    def before_chunk(transfer: Transfer, position: int) -> None:
        if position == 2:
            raise OSError("injected")

    with Rig(hooks=TransferHooks(before_chunk=before_chunk)) as rig:
        result = rig.finish(rig.submit(BACKUP, [0, 1, 2, 3], [0, 1, 2, 3]))
        assert result.done.tolist() == [True, True, False, False]


def test_cancelled_transfers_still_have_a_result(gate, monkeypatch):
    monkeypatch.setattr("phloem.transfer.engine.CHUNK_BYTES", 1)
    with Rig(hooks=TransferHooks(before_chunk=gate.before_chunk)) as rig:
        running = rig.submit(BACKUP, [0, 1, 2], [0, 1, 2])
        gate.await_chunk()
        waiting = rig.submit(LOAD, [3], [3], after_step=9)  # its step will never come
        rig.engine.cancel(running)
        rig.engine.cancel(waiting)
        rig.engine.cancel(12345)
        gate.go()
        assert rig.finish(running).done.tolist() == [True, False, False]
        assert rig.finish(waiting).done.tolist() == [False]


def test_closing_wakes_a_worker_that_waits_for_a_layer():
    rig = Rig()
    load = rig.submit(LOAD, [0], [0], after_step=9)
    waiter = threading.Thread(target=rig.engine.wait_layer, args=((load,), 0))
    waiter.start()
    rig.engine.close()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()


def test_a_layer_that_never_comes_fails_the_step_instead_of_hanging_it(monkeypatch):
    monkeypatch.setattr("phloem.transfer.layer_wait.LAYER_PATIENCE_S", 0.01)
    with Rig() as rig:
        load = rig.submit(LOAD, [0], [0], after_step=9)
        with pytest.raises(RuntimeError, match=f"layer 1 of load {load} did not arrive"):
            rig.engine.wait_layer((load,), 1)


def test_wait_returns_when_something_has_ended_and_not_before_its_time():
    with Rig() as rig:
        rig.engine.wait(0.0)
        load = rig.submit(LOAD, [0], [0])
        rig.engine.wait(PATIENCE_S)
        assert [result.id for result in rig.engine.poll()] == [load]
        started_s = rig.clock.now_s()
        rig.engine.wait(0.01)
        assert rig.clock.now_s() - started_s >= 0.009
