"""Which ranks compute the same, which hold the same, and who owns a page."""

from __future__ import annotations

import pytest

from phloem.core.mesh import Mesh, ShardAxis
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec


def spec(kind: AttentionKind) -> KVSpec:
    latent = kind is AttentionKind.MLA
    return KVSpec(
        kind=kind,
        dtype=KVDtype.FP32,
        num_layers=1,
        num_kv_heads=1 if latent else 4,
        head_dim=8,
        page_size=4,
        rope_dim=2 if latent else 0,
    )


def test_ranks_of_a_row_stand_side_by_side() -> None:
    mesh = Mesh(tp=2, cp=3)
    assert mesh.world == 6
    assert [(mesh.cp_index(r), mesh.tp_index(r)) for r in range(6)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert mesh.row_of(3) == (2, 3)


def test_a_row_owns_the_pages_whose_heads_it_divides() -> None:
    axis = spec(AttentionKind.GQA).shard_axis(Mesh(tp=2, cp=3))
    assert (axis.size, axis.owners_per_row) == (3, 1)
    assert [axis.owner_of(r) for r in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [axis.part_of(r) for r in range(6)] == [0, 1, 0, 1, 0, 1]
    assert axis.peers_of(3) == (1, 3, 5)


def test_every_rank_owns_latents() -> None:
    axis = spec(AttentionKind.MLA).shard_axis(Mesh(tp=2, cp=3))
    assert (axis.size, axis.owners_per_row) == (6, 2)
    assert [axis.owner_of(r) for r in range(6)] == list(range(6))
    assert axis.peers_of(3) == tuple(range(6))


@pytest.mark.parametrize("kind", list(AttentionKind))
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_a_page_is_computed_by_the_row_that_owns_it(kind: AttentionKind, tp: int, cp: int) -> None:
    """Owners follow one another row by row; every owner is its own peer at its own place."""
    mesh = Mesh(tp=tp, cp=cp)
    axis: ShardAxis = spec(kind).shard_axis(mesh)
    for rank in range(mesh.world):
        owner = axis.owner_of(rank)
        assert owner // axis.owners_per_row == mesh.cp_index(rank)
        assert axis.peers_of(rank)[owner] == rank
        assert len(axis.peers_of(rank)) == axis.size
