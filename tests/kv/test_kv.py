"""Page arithmetic: bytes, layout, sizing."""

from __future__ import annotations

import math

import pytest

from phloem.core.errors import ConfigError
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
