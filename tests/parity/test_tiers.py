"""Journeys through host memory give what no cache gives: tokens, logits, page bytes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from phloem.tiers import TierConfig
from tests.parity.rig import Cold, Rig, check_all
from tests.parity.test_journeys import words

POLICIES = ["write_through", "write_through_selective", "write_back"]


def chat(rig: Rig, seed: int, turns: int) -> list[int]:
    """A conversation, teacher-forced on nothing: each turn is the last prompt, answer and more.

    Between its turns another one passes through the cache, so that the device forgets.
    """
    cached = []
    history, other = words(seed, 6), words(seed + 1, 6)
    for turn in range(turns):
        answer = rig.ask(history, 3)
        cached.append(answer.cached)
        history = history + answer.tokens + words(seed + 100 + turn, 4)
        other = other + rig.ask(other, 2).tokens + words(seed + 200 + turn, 5)
    return cached


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_chat_of_twelve_turns_through_a_small_device_equals_cold(
    tiny: Path, cold: Cold, page_size: int, policy: str, overlap: bool
) -> None:
    """The device holds hardly more than one conversation; the host holds both."""
    pages = 120 // page_size
    with Rig(
        tiny,
        page_size=page_size,
        num_pages=pages,
        host_pages=4 * pages,
        overlap=overlap,
        tiers=TierConfig(write_policy=policy),
    ) as rig:
        cached = chat(rig, 50, 12)
        sources = [a.sources for a in rig.answers.values()]
        assert sum(s.host for s in sources) > 0
        if policy == "write_through":
            assert all(now > before for before, now in itertools.pairwise(cached))
        check_all(rig, cold)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_host_smaller_than_the_device_is_of_use(tiny: Path, cold: Cold, policy: str) -> None:
    with Rig(
        tiny, page_size=4, num_pages=30, host_pages=20, tiers=TierConfig(write_policy=policy)
    ) as rig:
        chat(rig, 60, 11)
        assert sum(a.sources.host for a in rig.answers.values()) > 0
        check_all(rig, cold)


@pytest.mark.parametrize("chunk_pages", [1, 3])
def test_loads_beside_chunked_prefill_and_decodes(tiny: Path, cold: Cold, chunk_pages: int) -> None:
    """Several conversations at once, some loaded, some computed, some decoding."""
    with Rig(
        tiny,
        page_size=4,
        num_pages=60,
        host_pages=240,
        max_prefill_tokens=max(16, 4 * chunk_pages),
        max_running=4,
    ) as rig:
        chats = [words(70 + i, 9 + 7 * i) for i in range(5)]
        for turn in range(4):
            ids = [rig.add(each, 5) for each in chats]
            rig.loop.run_until_idle()
            chats = [
                rig.answers[name].prompt + rig.answers[name].tokens + words(80 + 10 * turn + i, 5)
                for i, name in enumerate(ids)
            ]
        assert sum(a.sources.host for a in rig.answers.values()) > 0
        check_all(rig, cold)
