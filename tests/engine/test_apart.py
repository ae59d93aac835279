"""Ranks that share no memory form their groups: over a store, with real gloo."""

from __future__ import annotations

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
from phloem.engine.remote_kv import layer_shape
from phloem.worker import RankPlace, WorkerOptions, load_local_ranks
from tests.contract.test_groups import in_threads
from tests.models.checkpoints import make_checkpoint

PATIENT_S = 60.0
SQUARE = Mesh(tp=2, cp=2)


def at(store: dist.Store, rank: int, timeout_s: float = PATIENT_S) -> Rendezvous:
    return Rendezvous(rank=rank, store=store, address="127.0.0.1", timeout_s=timeout_s)


def places_of(axis: ShardAxis) -> list[RankPlace]:
    store = dist.HashStore()
    found = in_threads(axis.mesh.world, lambda rank: place_apart(at(store, rank), axis, 4))
    return cast(list[RankPlace], found)


def total(group: Group[torch.Tensor] | None, rank: int) -> int:
    """The sum of 10 ** rank over the group: it says who is in it."""
    assert group is not None
    mine = torch.tensor([10**rank])
    group.all_reduce(mine, Reduce.SUM)
    return int(mine)


def leave(places: list[RankPlace]) -> None:
    for place in places:
        place.leave()


def test_a_square_of_ranks_has_columns_and_rows() -> None:
    """Red if two groups meet under one name, or a rank is taken for its number in another one.
    Sampled tokens come to all, those of the own row included."""
    places = places_of(ShardAxis(mesh=SQUARE, ranks_per_owner=2))

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
    places[3].leave()
    with pytest.raises(GroupError, match="rank 3 of tp is gone: all_reduce"):
        total(places[2].row, 2)
    with pytest.raises(GroupError, match="rank 3 of cp is gone: all_reduce"):
        total(places[1].group, 1)
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
