"""Several ranks on one cache: whatever rank owns a page, all journeys equal the cold one rank.

Ranks are threads. Freed pages are NaN, filled by their owners; every rank's copy of the cache is
compared with the leader's in every step.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from phloem.kv.sizing import least_window_pages
from phloem.tiers import TierConfig
from tests.models.test_windows import pairwise
from tests.parity.come_and_go import come_and_go
from tests.parity.conftest import Windowed
from tests.parity.rig import Cold, Rig, check_all
from tests.parity.test_tiers import chat

PLACEMENTS = ("striped", "contiguous")
CASES = pairwise((2, 4), PLACEMENTS, (1, 4), (True, False), ("auto", "torch"))


@pytest.mark.parametrize(("ranks", "placement", "page_size", "overlap", "kernels"), CASES, ids=str)
def test_requests_that_come_and_go_over_a_small_pool(
    tiny: Path, cold: Cold, ranks: int, placement: str, page_size: int, overlap: bool, kernels: str
) -> None:
    rng = random.Random(f"{ranks} {placement} {page_size}")
    with Rig(
        tiny,
        page_size=page_size,
        num_pages=240 // page_size,
        max_prefill_tokens=20,
        max_running=4,
        overlap=overlap,
        kernels=kernels,
        ranks=ranks,
        placement=placement,
    ) as rig:
        come_and_go(rig, rng, 16)
        check_all(rig, cold)


@pytest.mark.parametrize(("ranks", "placement"), pairwise((2, 4), PLACEMENTS), ids=str)
def test_chats_through_host_and_storage(
    tiny: Path, cold: Cold, tmp_path: Path, ranks: int, placement: str
) -> None:
    """Loads of every rank's pages, waited for layer by layer; then another engine finds them."""
    for engine in (ranks, 1, 4):
        with Rig(
            tiny,
            page_size=4,
            num_pages=24,
            host_pages=120,
            ranks=engine,
            placement=placement,
            store=tmp_path,
            tiers=TierConfig(prefetch_policy="wait_complete"),
        ) as rig:
            chat(rig, 50, 8)
            sources = [answer.sources for answer in rig.answers.values()]
            assert sum(each.host for each in sources) > 0
            if engine is not ranks:
                assert sources[-1].storage + sources[-1].host + sources[-1].device > 0
                assert sum(each.storage for each in sources) > 0
            check_all(rig, cold)


WINDOWS = pairwise(("mistral", "gemma3", "gpt_oss"), (4, 16), (1, 4), (2, 4), PLACEMENTS)


@pytest.mark.parametrize(("family", "window", "page_size", "ranks", "placement"), WINDOWS, ids=str)
def test_windows_lie_beside_their_full_pages(
    windowed: Windowed, family: str, window: int, page_size: int, ranks: int, placement: str
) -> None:
    """Tails go to the host and come back, on the rank that owns the full page."""
    path, cold = windowed(family, window)
    pages = 160 // page_size
    with Rig(
        path,
        page_size=page_size,
        num_pages=pages,
        window_pages=ranks * (least_window_pages(window, page_size) + 2),
        host_pages=4 * pages,
        window_host_pages=2 * pages,
        ranks=ranks,
        placement=placement,
    ) as rig:
        chat(rig, 50, 6)
        check_all(rig, cold)
