"""Windows in all tiers: after any journey of tails, tokens, logits and page bytes are cold's."""

from __future__ import annotations

from pathlib import Path

import pytest

from phloem.kv.sizing import least_window_pages
from phloem.tiers import TierConfig
from tests.models.test_windows import pairwise
from tests.parity.conftest import Windowed
from tests.parity.rig import Rig, check_all
from tests.parity.test_journeys import words
from tests.parity.test_tiers import POLICIES, chat

CASES = pairwise(("mistral", "gemma3", "gpt_oss"), (4, 16), (1, 4), tuple(POLICIES), (True, False))


@pytest.mark.parametrize(("family", "window", "page_size", "policy", "overlap"), CASES, ids=str)
def test_chats_through_a_small_device_equal_cold(
    windowed: Windowed, family: str, window: int, page_size: int, policy: str, overlap: bool
) -> None:
    """The device holds one conversation, and windows of what runs alone; the host holds all."""
    path, cold = windowed(family, window)
    pages = 140 // page_size
    with Rig(
        path,
        page_size=page_size,
        num_pages=pages,
        window_pages=least_window_pages(window, page_size) + 2,
        host_pages=4 * pages,
        window_host_pages=2 * pages,
        overlap=overlap,
        tiers=TierConfig(write_policy=policy),
    ) as rig:
        chat(rig, 50, 7)
        if policy != "write_through_selective":
            assert sum(a.sources.host for a in rig.answers.values()) > 0
        check_all(rig, cold)


RESTARTS = pairwise(("mistral", "gemma3", "gpt_oss"), (4, 16), (1, 4), tuple(POLICIES))


@pytest.mark.parametrize(("family", "window", "page_size", "policy"), RESTARTS, ids=str)
def test_a_chat_goes_on_after_a_restart(
    windowed: Windowed, tmp_path: Path, family: str, window: int, page_size: int, policy: str
) -> None:
    """Three engines on one directory; full pages and the tail come from it, and nothing wrong."""
    path, cold = windowed(family, window)
    history: list[int] = words(40, 30)
    for engine in range(3):
        with Rig(
            path,
            page_size=page_size,
            num_pages=240 // page_size,
            window_pages=120 // page_size,
            host_pages=480 // page_size,
            window_host_pages=240 // page_size,
            store=tmp_path,
            tiers=TierConfig(write_policy=policy, prefetch_policy="wait_complete"),
        ) as rig:
            for turn in range(3):
                answer = rig.ask(history, 3)
                if turn == 0 and engine and policy != "write_through_selective":
                    # Two pages fewer than all: the open page, and the last sampled token.
                    assert answer.sources.storage >= len(history) - 8 - 2 * page_size
                history = history + answer.tokens + words(300 + 10 * engine + turn, 4)
            check_all(rig, cold)
