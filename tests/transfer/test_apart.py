"""Transfers to ranks whose memory is elsewhere: right bytes, never before their time, and an end
whatever becomes of a rank."""

from __future__ import annotations

import logging
import random
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from phloem.core.errors import GroupError
from phloem.core.mesh import Mesh
from phloem.core.transfer import LayerGate, Transfer, TransferKind, TransferResult
from phloem.pools import DevicePool
from phloem.transfer import PageLink, PageServer, TransferHooks
from phloem.transfer.component import layers_needed
from phloem.transfer.page_link import Get, LiveLoad, LoadNews
from tests.transfer.apart_rig import HOST_PAGES, LAYERS, PAGES, THREE, ApartRig
from tests.transfer.rig import PATIENCE_S
from tests.transfer.test_copies import Gate

BACKUP, LOAD = TransferKind.BACKUP_HOST, TransferKind.LOAD_BACK
NUM_LAYERS = 1 + max(max(layers) for layers in LAYERS)
Page = tuple[int, int]  # owner, slot


@dataclass
class Flight:
    """A transfer under way. `before`, `host_before`: what its pages held when it began."""

    transfer: Transfer
    device: list[Page]
    host: list[int]
    before: list[bytes]
    host_before: list[bytes]
    steps: list[threading.Thread] = field(default_factory=list)
    looks: list[bool] = field(default_factory=list)  # each: a layer was there when it was read


class Walk:
    """Transfers at random over a rig, beside a model that says what every page must hold."""

    def __init__(self, seed: int, chunk_bytes: int = 1, mesh: Mesh = THREE) -> None:
        self.rng = random.Random(seed)
        self.permits = threading.Semaphore(0)
        hooks = TransferHooks(before_chunk=self._before_chunk)
        self.rig = ApartRig(hooks=hooks, chunk_bytes=chunk_bytes, mesh=mesh)
        self.flights: dict[int, Flight] = {}
        self.step = 0  # the newest that has finished
        self.num_done = {BACKUP: 0, LOAD: 0}
        self.num_failed = 0
        self._free_pages = [
            [(owner, slot) for owner in range(mesh.cp) for slot in range(PAGES)] for _ in LAYERS
        ]
        self._free_slots = [list(range(HOST_PAGES)) for _ in LAYERS]
        self._failing = {(t, p) for t in range(200) for p in range(4) if self.rng.random() < 0.04}

    def _before_chunk(self, transfer: Transfer, position: int) -> None:
        assert self.permits.acquire(timeout=PATIENCE_S)
        if (transfer.id, position) in self._failing:
            raise OSError("injected")

    def read(self, component: int, page: Page) -> bytes:
        return self.rig.read_page(component, *page)

    def write(self, component: int, page: Page) -> None:
        data = self.rng.randbytes(self.rig.arenas[component].layout.spec.page_bytes)
        self.rig.write_page(component, *page, data)

    def begin(self) -> None:
        component = self.rng.randrange(len(LAYERS))
        pages, slots = self._free_pages[component], self._free_slots[component]
        count = min(self.rng.randrange(1, 5), len(pages), len(slots))
        if count == 0:
            return
        device = [pages.pop(self.rng.randrange(len(pages))) for _ in range(count)]
        host = [slots.pop(self.rng.randrange(len(slots))) for _ in range(count)]
        arena = self.rig.arenas[component]
        for page, slot in zip(device, host, strict=True):
            self.write(component, page)
            arena.write_page(slot, self.rng.randbytes(arena.layout.spec.page_bytes))
        kind = self.rng.choice((BACKUP, LOAD))
        after_step = self.rng.choice((-1, self.step, self.step + 1, self.step + 2))
        before = [self.read(component, page) for page in device]
        host_before = [arena.read_page(slot) for slot in host]
        transfer_id = self.rig.submit(
            kind, device, host, component=component, after_step=after_step
        )
        transfer = Transfer(id=transfer_id, kind=kind, component=component, after_step=after_step)
        flight = Flight(transfer, device, host, before, host_before)
        self.flights[transfer_id] = flight
        if kind is LOAD:
            self._read_layers(flight)

    def _read_layers(self, flight: Flight) -> None:
        """A step on every rank that reads its pages as soon as it may."""
        for rank, gate in enumerate(self.rig.gates):
            thread = threading.Thread(target=self._wait, args=(flight, gate, rank))
            thread.start()
            flight.steps.append(thread)

    def _wait(self, flight: Flight, gate: LayerGate, rank: int) -> None:
        component, axis = flight.transfer.component, self.rig.axis
        layers, pool = LAYERS[component], self.rig.pools[rank][component]
        own = [
            (slot, self.rig.parts(page)[axis.part_of(rank)])
            for (owner, slot), page in zip(flight.device, flight.host_before, strict=True)
            if owner == axis.owner_of(rank)
        ]
        for layer in range(NUM_LAYERS):
            gate.wait_layer((flight.transfer.id,), layer)
            if layer in layers:
                flight.looks += [
                    _layer(pool.read_page(slot), pool, layers.index(layer))
                    == _layer(expected, pool, layers.index(layer))
                    for slot, expected in own
                ]

    def finish_step(self) -> None:
        """Until now the step may have read what loads will overwrite, and written what backups
        will read: nothing of these has moved."""
        for flight in self.flights.values():
            component = flight.transfer.component
            if flight.transfer.after_step <= self.step:
                continue
            for i, page in enumerate(flight.device):
                if flight.transfer.kind is LOAD:
                    assert self.read(component, page) == flight.before[i]
                else:
                    held = self.rig.arenas[component].read_page(flight.host[i])
                    assert held == flight.host_before[i]
                    self.write(component, page)
                    flight.before[i] = self.read(component, page)
        self.step += 1
        for gate in self.rig.gates:
            gate.step_finished(self.step + 1)  # a rank that is ahead: the others are not
        self.rig.engine.step_finished(self.step)

    def take(self, result: TransferResult) -> None:
        flight = self.flights.pop(result.id)
        kind, component = flight.transfer.kind, flight.transfer.component
        for thread in flight.steps:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a step waits for a load that is over"
        self._free_pages[component] += flight.device
        self._free_slots[component] += flight.host
        self.num_failed += not result.done.all()
        for i in np.flatnonzero(result.done).tolist():
            held = self.rig.arenas[component].read_page(flight.host[i])
            wanted = flight.before[i] if kind is BACKUP else flight.host_before[i]
            assert (held, self.read(component, flight.device[i])) == (wanted, wanted)
            self.num_done[kind] += 1
        if kind is LOAD and result.done.all():
            assert all(flight.looks), "a layer was read before it was there"

    @property
    def has_seen_all(self) -> bool:
        """Pages that arrived in both directions, and transfers that did not."""
        return min(self.num_done.values()) > 10 and self.num_failed > 2

    def act(self) -> None:
        match self.rng.randrange(12):
            case 0 | 1 | 2:
                self.begin()
            case 3 | 5:
                self.finish_step()
            case 4 if self.flights and self.rng.random() < 0.5:
                self.rig.engine.cancel(self.rng.choice(sorted(self.flights)))
            case _:
                self.permits.release(self.rng.randrange(1, 6))
                self.rig.engine.wait(0.001)
        for result in self.rig.poll():
            self.take(result)

    def end(self) -> None:
        for _ in range(3):
            self.finish_step()
        self.permits.release(10_000)
        while self.flights:
            self.rig.engine.wait(1.0)
            for result in self.rig.poll():
                self.take(result)


def _layer(page: bytes, pool: DevicePool, at: int) -> bytes:
    """One layer of all head groups of the pool."""
    groups, layers = pool.layout.num_head_groups, pool.layout.spec.num_layers
    size = len(page) // (groups * layers)
    return b"".join(page[(group * layers + at) * size :][:size] for group in range(groups))


def walks(seeds: Iterable[int], *shape: Any) -> list[Walk]:
    made = []
    for seed in seeds:
        made.append(each := Walk(seed, *shape))
        with each.rig:
            try:
                acts = 0
                while acts < 250 or not each.has_seen_all:  # on a slow machine little moves
                    each.act()
                    acts += 1
                each.end()
            finally:
                each.permits.release(10_000)  # else its copy thread cannot end
    return made


@pytest.fixture
def pieces(monkeypatch):
    """Pages go one by one."""
    monkeypatch.setattr("phloem.transfer.apart.PIECE_BYTES", 1)


ROWS = Mesh(tp=2, cp=2)


@pytest.mark.parametrize(
    ("mesh", "chunk_bytes", "piece_bytes"),
    [(THREE, 1, 1), (THREE, 9000, 6000), (ROWS, 1, 1), (ROWS, 9000, 3000)],
    ids=str,
)
@pytest.mark.parametrize("seed", range(2))
def test_a_walk_moves_what_a_naive_model_says(
    seed, mesh, chunk_bytes, piece_bytes, monkeypatch, caplog
):
    """Backups and loads of pages of all ranks, cancelled and failing, beside steps that wait for
    their layers. Red if bytes come to another place or too early, or a step waits for ever."""
    monkeypatch.setattr("phloem.transfer.apart.PIECE_BYTES", piece_bytes)
    with caplog.at_level(logging.CRITICAL):
        (made,) = walks([seed], chunk_bytes, mesh)
    assert made.has_seen_all
    assert not made.rig.lost


MUTATIONS = {
    "it waits for no layer": ("PageServer.wait_layer", lambda *_: None),
    "it counts one layer too many": ("layers_needed", lambda *of: max(0, layers_needed(*of) - 1)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_rank_that_does_not_wait_is_noticed(name, pieces, monkeypatch, caplog):
    where, what = MUTATIONS[name]
    monkeypatch.setattr(f"phloem.transfer.page_server.{where}", what)
    with caplog.at_level(logging.CRITICAL), pytest.raises(AssertionError, match="before it was"):
        walks(range(6))


def test_the_leaders_own_step_lets_nothing_move():
    """Another rank may still be at it. Red if its gate passes that on to the engine."""
    gate = Gate()
    with ApartRig(hooks=TransferHooks(before_chunk=gate.before_chunk)) as rig:
        gate.go(100)
        late = rig.submit(LOAD, [(1, 0)], [0], after_step=3)
        rig.gates[0].step_finished(3)
        early = rig.submit(LOAD, [(1, 1)], [1])
        rig.finish(early)
        assert {transfer for transfer, _ in gate.chunks} == {early}
        rig.engine.step_finished(3)
        assert rig.finish(late).done.all()


def test_each_page_crosses_a_link_once(pieces):
    """And only the link of the rank that owns it."""
    with ApartRig() as rig:
        page_bytes = rig.arenas[0].layout.spec.page_bytes
        device = [(0, 0), (1, 1), (1, 2), (2, 3)]
        for kind, turns in ((BACKUP, 1), (LOAD, 2)):
            rig.finish(rig.submit(kind, device, [0, 1, 2, 3]))
            assert [link.num_bytes for link in rig.links] == [
                turns * 2 * page_bytes,
                turns * page_bytes,
            ]


@pytest.mark.parametrize("dead", [1, 2])
def test_a_rank_that_dies_in_mid_transfer_fails_it_and_wakes_all(dead, caplog):
    """Pages of the others go on, in step with what they are asked; the dead one fails at once."""
    gate, alive = Gate(), 3 - dead
    with ApartRig(hooks=TransferHooks(before_chunk=gate.before_chunk)) as rig:
        load = rig.submit(LOAD, [(1, 0), (2, 0), (0, 0)], [0, 1, 2])
        steps = [
            threading.Thread(target=each.wait_layer, args=((load,), NUM_LAYERS - 1))
            for each in rig.gates
        ]
        for step in steps:
            step.start()
        assert gate.await_chunk() == (load, 0)
        gate.go()
        assert gate.await_chunk() == (load, 1)
        rig.theirs[dead - 1].close()
        gate.go(1000)
        result = rig.finish(load)
        assert not result.done.any()
        assert f"rank {dead}" in (result.error or "")
        for step in steps:
            step.join(PATIENCE_S)
            assert not step.is_alive()
        arena = rig.arenas[0]
        arena.write_page(5, random.Random(1).randbytes(arena.layout.spec.page_bytes))
        assert rig.finish(rig.submit(LOAD, [(alive, 4), (0, 4)], [5, 5])).done.all()
        assert rig.finish(rig.submit(BACKUP, [(alive, 4)], [7])).done.all()
        assert rig.pools[alive][0].read_page(4) == arena.read_page(5) == arena.read_page(7)
        assert not rig.finish(rig.submit(BACKUP, [(dead, 4)], [6])).done.any()
        assert rig.lost == [dead]
        assert "Traceback" not in caplog.text


def test_a_rank_that_answers_nothing_is_given_up_in_time():
    ours, theirs = socket.socketpair()
    lost = threading.Event()
    link = PageLink(ours, rank=3, lost=lost.set, patience_s=0.01)
    with pytest.raises(GroupError, match="rank 3: timed out"):
        link.receive_ack()
    assert lost.is_set()
    link.close()
    theirs.close()


def test_a_link_that_is_closed_wakes_who_uses_it_and_nobody_is_to_blame():
    ours, theirs = socket.socketpair()
    lost = threading.Event()
    link = PageLink(ours, rank=3, lost=lost.set)
    errors: list[GroupError] = []

    def read() -> None:
        try:
            link.receive()
        except GroupError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    link.close()
    link.close()
    reader.join(PATIENCE_S)
    assert not reader.is_alive()
    assert len(errors) == 1
    assert not lost.is_set()
    theirs.close()


@pytest.fixture
def told():
    """A rank's gate, and the leader's end of its link."""
    with ApartRig() as rig:
        ours, theirs = socket.socketpair()
        leader, link = PageLink(ours, rank=1), PageLink(theirs, rank=0)
        yield leader, PageServer(link, rig.pools[1], LAYERS)
        leader.close()


def test_a_load_that_nobody_has_told_of_is_waited_for(told, monkeypatch):
    """The step's record may come before anything of the load; one that is over may be named too."""
    leader, server = told
    monkeypatch.setattr("phloem.transfer.layer_wait.LAYER_PATIENCE_S", 0.01)
    with pytest.raises(RuntimeError, match="layer 0 of load 7 did not arrive"):
        server.wait_layer((7,), 0)
    leader.send(LoadNews(7, (LiveLoad(6, 0, 2),)))
    monkeypatch.setattr("phloem.transfer.layer_wait.LAYER_PATIENCE_S", PATIENCE_S)
    server.wait_layer((7, 6), LAYERS[0][1])
    monkeypatch.setattr("phloem.transfer.layer_wait.LAYER_PATIENCE_S", 0.01)
    with pytest.raises(RuntimeError, match="layer 3 of load 6"):
        server.wait_layer((7, 6), LAYERS[0][2])
    server.wait_layer((6,), LAYERS[1][1])  # reads no page of that component


def test_a_rank_that_cannot_do_as_it_is_told_ends(told, caplog):
    """Red if the leader would wait for its answer."""
    leader, server = told
    lost = threading.Event()
    server._link.lost = lost.set
    leader.send(Get(0, (99).to_bytes(8, "little")))
    with pytest.raises(GroupError, match="it has closed the connection"):
        leader.receive_ack()
    assert lost.wait(PATIENCE_S)
    server.wait_layer((1,), 0)
    assert "cannot be read or written" in caplog.text
