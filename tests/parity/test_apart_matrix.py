"""Rows of ranks that share no memory: meshes x attention x page dtypes x ways, as
`test_rank_matrix.py` has them with shared memory and tiers. Long: `test_apart.py` has some of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.parity.rig import Rig
from tests.parity.test_rank_matrix import (
    DTYPES,
    KINDS,
    Oracles,
    _again,
    _check_near,
    _head,
    _shape,
)

MESHES = ((2, 1), (2, 2), (4, 1))  # tp, cp
PRODUCT = tuple(itertools.product(MESHES, KINDS, DTYPES, ("gather_kv", "send_q")))

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracles]:
    made = Oracles(tmp_path_factory.mktemp("apart"))
    yield made
    made.close()


@pytest.mark.parametrize("cell", PRODUCT, ids=str)
def test_a_head_that_is_found_on_the_device(
    oracles: Oracles, cell: tuple[tuple[int, int], str, str, str]
) -> None:
    """Answers, logits and all pages are cold's, but for what lies on an edge."""
    mesh, kind, dtype, way = cell
    shape = _shape(mesh, way, dtype, "auto") | {"host_pages": 0, "tiers": None}
    with Rig(oracles.path(kind), **shape, apart=True) as rig:
        head = _head(rig, 5000 + PRODUCT.index(cell))
        _again(rig, head, "device")
        _check_near(rig, oracles.cold(kind, "auto", dtype), dtype)
