"""Ranks that share no memory form their groups: over a store, with real gloo."""

from __future__ import annotations

import gc
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist

from phloem.core.errors import EngineDead, GroupError
from phloem.core.group import Group, Reduce
from phloem.core.mesh import Mesh, ShardAxis
from phloem.core.plan import RowPlan
from phloem.engine.apart import Rendezvous, place_apart
from phloem.engine.greeting import present
from phloem.engine.remote_kv import layer_shape
from phloem.engine.row_seats import machine_name, row_seat
from phloem.groups import GroupSeat, ShmGroup, TorchGroup
from phloem.worker import RankPlace, WorkerOptions, load_local_ranks
from tests.contract.test_groups import in_threads
from tests.models.checkpoints import make_checkpoint

PATIENT_S = 60.0
SQUARE = Mesh(tp=2, cp=2)


HERE = machine_name()


def at(
    store: dist.Store, rank: int, timeout_s: float = PATIENT_S, machine: str = HERE
) -> Rendezvous:
    return Rendezvous(
        rank=rank, store=store, address="127.0.0.1", timeout_s=timeout_s, machine=machine
    )


def places_of(axis: ShardAxis, machines: Sequence[str] = (HERE,) * 4) -> list[RankPlace]:
    store = dist.HashStore()

    def come(rank: int) -> RankPlace:
        return place_apart(at(store, rank, machine=machines[rank]), axis, 4)

    return cast(list[RankPlace], in_threads(axis.mesh.world, come))


def total(group: Group[torch.Tensor] | None, rank: int) -> int:
    """The sum of 10 ** rank over the group: it says who is in it."""
    assert group is not None
    mine = torch.tensor([10**rank])
    group.all_reduce(mine, Reduce.SUM)
    return int(mine)


def leave(places: list[RankPlace]) -> None:
    for place in places:
        place.leave()


@pytest.mark.parametrize(
    "machines",
    [("", "", "", ""), (HERE, HERE, "a", "b"), (HERE,) * 4],
    ids=["apart", "one row on one machine", "all on one machine"],
)
def test_a_square_of_ranks_has_columns_and_rows(machines: tuple[str, ...]) -> None:
    """Red if two groups meet under one name, or a rank is taken for its number in another one; if a
    row that is on two machines takes itself to be on one. Sampled tokens come to all, those of the
    own row included."""
    places = places_of(ShardAxis(mesh=SQUARE, ranks_per_owner=2), machines)
    shares = [machines[row] == machines[row + 1] == HERE for row in (0, 0, 2, 2)]
    kinds = [ShmGroup if each else TorchGroup for each in shares]
    assert [type(place.row) for place in places] == kinds

    def play(rank: int) -> tuple[int, int, int]:
        place = places[rank]
        sums = total(place.group, rank), total(place.row, rank)
        row = RowPlan(row=1, serial=7, start=3, count=1, tokens=None, sample=True)
        sampled = place.peers._sampled
        place.peers.begin(0)
        if rank == 2:
            sampled.put(row, 99)
        place.peers.finished(0, [row], [2])
        place.peers.begin(1)
        return *sums, sampled.find(row) or 0

    assert in_threads(4, play) == [
        (101, 11, 99),
        (1010, 11, 99),
        (101, 1100, 99),
        (1010, 1100, 99),
    ]
    assert [place.group.members for place in places if place.group] == [(0, 2), (1, 3)] * 2
    assert [place.owner for place in places] == [0, 0, 1, 1]
    gone = 1 if machines[0] else 3
    places[gone].leave()
    with pytest.raises(GroupError, match=f"rank {gone} of tp is gone: all_reduce"):
        total(places[gone - 1].row, gone - 1)
    leave(places)


def test_where_every_rank_owns_pages_these_travel_among_all() -> None:
    places = places_of(ShardAxis(mesh=SQUARE, ranks_per_owner=1))
    sums = in_threads(4, lambda r: (total(places[r].group, r), total(places[r].row, r)))
    assert sums == [(1111, 11), (1111, 11), (1111, 1100), (1111, 1100)]
    leave(places)


def test_one_row_has_nobody_who_holds_the_same_heads() -> None:
    places = places_of(ShardAxis(mesh=Mesh(tp=2), ranks_per_owner=2))
    assert [place.group for place in places] == [None, None]
    assert in_threads(2, lambda rank: total(places[rank].row, rank)) == [11, 11]
    leave(places)


def test_a_rank_that_does_not_come_is_named() -> None:
    """By all others alike."""
    store, axis = dist.HashStore(), ShardAxis(mesh=SQUARE, ranks_per_owner=2)

    def come(index: int) -> str:
        with pytest.raises(EngineDead) as caught:
            place_apart(at(store, (0, 1, 3)[index], timeout_s=0.2), axis, 4)
        return str(caught.value)

    said = set(in_threads(3, come))
    assert len(said) == 1
    assert said.pop().startswith("rank 2 has not come to form groups for 0.2 s")


@pytest.mark.parametrize("maps_pools", [True, False])
def test_a_token_weighs_what_its_rank_has_of_it(tmp_path: Path, maps_pools: bool) -> None:
    """What `auto` reckons with. Red if a rank is taken to send the heads of its whole row."""
    make_checkpoint("llama", tmp_path)
    options = WorkerOptions(dtype="fp32", page_size=4, num_pages=8, max_running=2, threads=1)
    loaded = load_local_ranks(tmp_path, options, 2, tp=2, maps_pools=maps_pools)
    page_of_a_layer = loaded.pool.buffer.layer(0)[0]
    kv_bytes = layer_shape(loaded, ShardAxis(mesh=SQUARE, ranks_per_owner=2)).kv_bytes
    assert 4 * kv_bytes == page_of_a_layer.numel() * page_of_a_layer.itemsize
    loaded.worker.close()


def play_a_row() -> None:
    """Three ranks, of which the last one comes after two strangers."""
    store, ranks = dist.HashStore(), (5, 6, 7)
    deadline_s = time.monotonic() + PATIENT_S

    def sit(at: int) -> GroupSeat:
        if at == 2:
            store.wait(["seats"])
            card = json.loads(store.get("seats"))
            for secret, claimed in ((b"guessed", 6), (bytes.fromhex(card["secret"]), 9)):
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.connect(f"\0{card['name']}")
                    with pytest.raises(ConnectionError):
                        present(stranger, secret, claimed)
        return row_seat(store, ranks, ranks[at], timeout_s=PATIENT_S, deadline_s=deadline_s)

    groups = [ShmGroup(cast(GroupSeat, seat)) for seat in in_threads(3, sit)]
    assert in_threads(3, lambda rank: total(groups[rank], rank)) == [111, 111, 111]
    assert groups[1].members == ranks
    for group in groups:
        group.close()


def test_a_row_on_one_machine_shares_memory_among_its_ranks_alone() -> None:
    """Red if whoever asks gets a seat, or takes one away; if a descriptor stays open."""
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    play_a_row()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_does_not_take_its_seat_is_named() -> None:
    store, soon_s = dist.HashStore(), time.monotonic() + 0.2
    with pytest.raises(GroupError, match=r"^ranks 6, 7 have not come for a seat") as caught:
        row_seat(store, (5, 6, 7), 5, timeout_s=PATIENT_S, deadline_s=soon_s)
    assert caught.value.ranks == (6, 7)
    with pytest.raises(GroupError, match=r"^rank 6 has got no seat in its row: "):
        row_seat(store, (5, 6, 7), 6, timeout_s=PATIENT_S, deadline_s=soon_s)
