"""Page arithmetic: bytes, layout, sizing."""

from __future__ import annotations

import math

import pytest

from phloem.core.errors import ConfigError
from phloem.core.mesh import Mesh
from phloem.kv.layout import PageLayout, default_head_groups
from phloem.kv.sizing import num_pages_for, pages_for_tokens
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec


def make_spec(**changes: object) -> KVSpec:
    sizes: dict[str, object] = {
        "kind": AttentionKind.GQA,
        "dtype": KVDtype.BF16,
        "num_layers": 30,
        "num_kv_heads": 3,
        "head_dim": 64,
        "page_size": 16,
    }
    return KVSpec(**(sizes | changes))  # type: ignore[arg-type]


def test_page_bytes_of_smollm2() -> None:
    """30 layers x (K, V) x 3 heads x 64 x 2 bytes = 23,040 bytes a token."""
    spec = make_spec()
    assert spec.token_bytes == 23_040
    assert spec.page_bytes == 368_640


@pytest.mark.parametrize(
    ("dtype", "row_bytes", "token_bytes"),
    [
        ("fp32", 256, 46_080),
        ("bf16", 128, 23_040),
        ("int8", 64 + 2, 11_880),
        ("fp8", 64 + 2, 11_880),
        ("fp4", 32 + 4, 6_480),
    ],
)
def test_page_bytes_of_smollm2_in_every_dtype(dtype: str, row_bytes: int, token_bytes: int) -> None:
    """180 rows of 64 a token; scales lie in their row, so pages a GB grow as rows shrink."""
    spec = make_spec(dtype=KVDtype(dtype))
    assert (spec.row_bytes, spec.token_bytes) == (row_bytes, token_bytes)
    assert spec.page_bytes == 16 * token_bytes
    assert num_pages_for(spec, 10**9) == 10**9 // (16 * token_bytes)
    layout = PageLayout(spec, 3, 3)
    bytes_of_item = 1 if spec.dtype.is_packed else spec.dtype.part_bytes(1)
    assert math.prod(layout.shape) * bytes_of_item == layout.total_bytes


LATENT: dict[str, object] = {
    "kind": AttentionKind.MLA,
    "num_layers": 61,
    "num_kv_heads": 1,
    "head_dim": 576,
    "rope_dim": 64,
}


@pytest.mark.parametrize(
    ("dtype", "row_bytes"),
    [("bf16", 1152), ("int8", 512 + 2 + 64 + 2), ("fp4", 256 + 32 + 32 + 4)],
)
def test_page_bytes_of_deepseek_v3(dtype: str, row_bytes: int) -> None:
    """61 rows a token, one of a layer: not K and V of 128 heads, which are 71 times as much."""
    spec = make_spec(**LATENT, dtype=KVDtype(dtype))
    assert spec.parts == (512, 64)
    assert spec.token_bytes == 61 * row_bytes
    assert PageLayout(spec, 1, 1).shape[3] == 1
    heads = make_spec(num_layers=61, num_kv_heads=128, head_dim=(192 + 128) // 2)
    assert dtype != "bf16" or heads.token_bytes // spec.token_bytes == 71


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 2}, "a latent is of one head"),
        ({"retention": 128}, "and kept for all tokens"),
        ({"rope_dim": 576}, "a rotary part of 576 does not fit a row of 576"),
        ({"rope_dim": 0}, "a rotary part of 0 does not fit"),
        ({"kind": AttentionKind.GQA}, "a rotary part of 64 is kept apart in a latent only"),
        ({"rope_dim": 24, "dtype": KVDtype.FP4}, "does not divide rows of 552 and 24"),
        ({"rope_dim": 63, "dtype": KVDtype.INT8}, "need rows of even length"),
    ],
)
def test_latents_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_spec(**LATENT | changes)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_objects_tile_the_pool_exactly(groups: int) -> None:
    """Objects in (page, head group) order lie back to back and cover every byte once."""
    layout = PageLayout(make_spec(num_kv_heads=8), 5, groups)
    offsets = [layout.object_offset(p, g) for p in range(5) for g in range(groups)]
    assert offsets == list(range(0, layout.total_bytes, layout.object_bytes))
    assert math.prod(layout.shape) * KVDtype.BF16.part_bytes(1) == layout.total_bytes


def test_head_groups_must_divide_the_heads() -> None:
    with pytest.raises(ConfigError, match="do not divide"):
        PageLayout(make_spec(num_kv_heads=3), 1, 2)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 3), (8, 8), (10, 5), (16, 8), (13, 1)])
def test_default_head_groups_divide_and_stay_small(heads: int, groups: int) -> None:
    assert default_head_groups(heads) == groups


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (65, 5)])
def test_a_page_begun_is_a_page_needed(tokens: int, pages: int) -> None:
    assert pages_for_tokens(tokens, 16) == pages


def test_a_budget_below_one_page_says_what_to_do() -> None:
    spec = make_spec()
    assert num_pages_for(spec, spec.page_bytes * 3 + 1) == 3
    with pytest.raises(ConfigError, match="--kv-memory"):
        num_pages_for(spec, spec.page_bytes - 1)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="page_size"):
        make_spec(page_size=0)


def test_parts_of_a_page_are_its_objects_in_order() -> None:
    """What ranks that share no memory hold of a page is the page when it is laid side by side."""
    whole, mesh = PageLayout(make_spec(num_kv_heads=8), 5, 8), Mesh(tp=2, cp=2)
    axis = whole.spec.shard_axis(mesh)
    part = whole.of_one_rank(axis)
    assert (part.num_pages, part.num_head_groups, part.heads_per_group) == (5, 4, 1)
    assert part.object_bytes == whole.object_bytes
    assert 2 * part.spec.page_bytes == whole.spec.page_bytes
    for rank in range(mesh.world):
        low, high = whole.groups_of(axis, rank)
        assert low * whole.object_bytes == axis.part_of(rank) * part.spec.page_bytes
        assert high - low == part.num_head_groups
    latent = PageLayout(make_spec(kind=AttentionKind.MLA, num_kv_heads=1, rope_dim=16), 5, 1)
    assert latent.of_one_rank(latent.spec.shard_axis(mesh)) == latent
