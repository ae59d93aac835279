"""Every kind of attention with every page dtype on several ranks: the cold pass's bytes.

Numbers do not depend on what is computed together (`exact.py`), so answers, logits and pages are
those of one cold rank to the last bit, whichever rank has computed and whichever has read them:
from the device, the host, and a directory that another number of ranks has written.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from phloem.tiers import TierConfig
from tests.parity.conftest import Models
from tests.parity.exact import check_exact, sum_row_by_row
from tests.parity.rig import Cold, Rig
from tests.parity.test_dtypes import CELLS, journey, shape_of
from tests.parity.test_journeys import words

# Each of the cells of one rank, with a number of ranks, a placement, and who reads what they wrote.
RANKS = [(2, "striped", 1), (4, "striped", 2), (2, "contiguous", 4), (4, "contiguous", 1)]
CASES = [
    # A third by default: `test_rank_matrix.py` has these kinds, dtypes and tiers in pairs.
    pytest.param(*cell, *RANKS[i % len(RANKS)], marks=() if i % 3 == 0 else pytest.mark.long)
    for i, cell in enumerate(CELLS)
]


@pytest.mark.parametrize(
    ("kind", "dtype", "page_size", "pages", "ranks", "placement", "readers"), CASES, ids=str
)
def test_device_host_and_storage_equal_cold_to_the_last_bit(
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    kind: str,
    dtype: str,
    page_size: int,
    pages: int,
    ranks: int,
    placement: str,
    readers: int,
) -> None:
    sum_row_by_row(monkeypatch)
    path, shape = models(kind), shape_of(dtype, page_size, pages)
    cold = Cold(path, kernels="reference", kv_dtype=dtype)
    # Windows lie beside their full pages: every rank needs its share of the worst case.
    shape["num_pages"] = ranks * max(-(-int(str(shape["num_pages"])) // ranks), 6)
    shape["host_pages"] = 4 * int(str(shape["num_pages"]))
    shape["tiers"] = TierConfig(prefetch_policy="wait_complete")
    shape["placement"] = placement
    with Rig(path, **shape, store=tmp_path, ranks=ranks) as rig:
        history = journey(rig, words(1, 14), 4)
        assert sum(a.sources.device for a in rig.answers.values()) > 0
        assert check_exact(rig, cold) > 0
    shape["num_pages"] = readers * max(18, 72 // page_size)
    shape["host_pages"] = 4 * shape["num_pages"]
    with Rig(path, **shape, store=tmp_path, ranks=readers) as rig:
        answer = rig.ask(history, 3)
        assert answer.sources.storage > 0
        rig.cache.evict(rig.cache.evictable_pages)
        assert rig.ask(history + answer.tokens + words(99, 3), 2).sources.host > 0
        assert check_exact(rig, cold) > 0
