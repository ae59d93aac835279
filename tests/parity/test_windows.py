"""Models with windows: any way through both components gives what no cache gives.

Window state goes by itself, so a prefix may be hit whole, up to a shorter valid length, or by a
restart lower down; every way is taken here, and every one must equal cold: tokens, logits, and the
bytes of every page that the tree says is alive, in both components.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from phloem.core.request import FinishReason
from phloem.kv.sizing import least_window_pages, pages_for_tokens
from phloem.tiers import TierConfig
from tests.models.checkpoints import WINDOWED
from tests.models.test_windows import pairwise
from tests.parity.conftest import Windowed
from tests.parity.rig import Rig, check_all
from tests.parity.test_journeys import words

CASES = pairwise(tuple(WINDOWED), (4, 8, 16, 64), (1, 4, 16, 32))
FEW = pairwise(("mistral", "gemma3", "gpt_oss"), (4, 16), (1, 4))


def pool(window: int, page_size: int, tails: float) -> int:
    """A window pool for one request that runs, and the tails of some that do not."""
    return int(least_window_pages(window, page_size) * (1 + tails)) + 1


def run_chats(
    rig: Rig, seed: int, *, chats: int, turns: int, answer: int = 6, most: int = 230
) -> None:
    """Conversations by turns, several at once; heads are shared, tails are not."""
    rng = random.Random(seed)
    heads = [words(seed + i, rng.randrange(1, 40)) for i in range(2)]
    history = [list(rng.choice(heads)) for _ in range(chats)]
    for _ in range(turns):
        chosen = rng.sample(range(chats), k=rng.randrange(1, 4))
        ids = {}
        for chat in chosen:
            if len(history[chat]) < most:
                history[chat] += words(rng.randrange(10**6), rng.randrange(1, 30))
                ids[chat] = rig.add(list(history[chat]), rng.randrange(1, answer + 1))
                rig.loop.step()
        rig.loop.run_until_idle()
        for chat, name in ids.items():
            assert rig.answers[name].finish is FinishReason.LENGTH
            history[chat] += rig.answers[name].tokens


@pytest.mark.parametrize(("family", "window", "page_size"), CASES, ids=str)
def test_conversations_in_a_small_window_pool(
    windowed: Windowed, family: str, window: int, page_size: int
) -> None:
    """Tails are evicted while full pages stay: shorter valid lengths and restarts lower down."""
    path, cold = windowed(family, window)
    rng = random.Random(f"{family} {window} {page_size}")
    with Rig(
        path,
        page_size=page_size,
        num_pages=pages_for_tokens(1500, page_size),
        window_pages=pool(window, page_size, 2.5),
        max_prefill_tokens=page_size * rng.choice([1, 2, 3]) if page_size > 1 else 24,
        overlap=rng.random() < 0.7,
        checkpoint=rng.choice([0, 0, 2, 5]),
        max_running=4,
    ) as rig:
        run_chats(rig, rng.randrange(10**6), chats=6, turns=14)
        check_all(rig, cold)


@pytest.mark.parametrize(("family", "window", "page_size"), FEW, ids=str)
@pytest.mark.parametrize("chunk_pages", [1, 2, 3])
def test_a_lost_tail_is_made_again_in_chunks_of_any_size(
    windowed: Windowed, family: str, window: int, page_size: int, chunk_pages: int
) -> None:
    """All window state evicted, full kept; the next turn restarts, the one after it hits whole."""
    path, cold = windowed(family, window)
    with Rig(
        path,
        page_size=page_size,
        num_pages=pages_for_tokens(800, page_size),
        window_pages=pages_for_tokens(400, page_size),
        max_prefill_tokens=max(8, chunk_pages * page_size),
    ) as rig:
        layers = len(rig.loaded.config.component_layers[1])
        head = words(3, layers * window + 3 * page_size + 2 * window)
        first = rig.ask(head, 3)
        drop_windows(rig)
        turn = head + first.tokens + words(4, 5)
        second = rig.ask(turn, 3)
        full = (len(head) + len(first.tokens) - 1) // page_size * page_size
        (first_right,) = rig.recorder.first_right.values()
        assert first_right == full
        assert 0 < second.cached <= full - (window - 1) - (layers - 1) * (window - 1)
        third = rig.ask(turn + second.tokens + words(5, 3), 3)
        assert third.cached >= len(turn) // page_size * page_size - page_size
        assert len(rig.recorder.first_right) == 1
        check_all(rig, cold)


def drop_windows(rig: Rig) -> None:
    """Evict all window state that nobody holds: tombstones everywhere."""
    rig.loop.run_until_idle()
    ledger = rig.cache.leader.window
    ledger.evict(ledger.evictable_pages)
    assert ledger.free_pages == ledger.total_pages


@pytest.mark.parametrize(("window", "page_size"), [(4, 16), (8, 32), (4, 1), (1, 4), (2, 4)])
def test_o32_pages_larger_than_the_window(windowed: Windowed, window: int, page_size: int) -> None:
    """Next turns hit what the last ones left but for a page; W of one needs no tail at all."""
    path, cold = windowed("gemma3", window)
    for chunk_pages in (1, 2, 3):
        with Rig(
            path,
            page_size=page_size,
            num_pages=pages_for_tokens(1024, page_size),
            window_pages=pages_for_tokens(512, page_size) + 4,
            max_prefill_tokens=max(8, chunk_pages * page_size),
        ) as rig:
            history, before = words(window, page_size + 1), 0
            for turn in range(4):
                answer = rig.ask(history, 3)
                if turn:
                    assert answer.cached >= before // page_size * page_size - page_size
                before = len(history)
                history = history + answer.tokens + words(turn, page_size)
            check_all(rig, cold)


def test_a_prompt_of_many_windows_passes_through_a_pool_of_two(windowed: Windowed) -> None:
    """100 pages of prompt, a window pool of 12: pages are let go of as the prompt moves on."""
    path, cold = windowed("gpt_oss", 16)
    with Rig(path, page_size=4, num_pages=128, window_pages=12, max_prefill_tokens=16) as rig:
        prompt = words(8, 400)
        rig.ask(prompt, 20)
        assert rig.ask(prompt, 20).cached == 396
        check_all(rig, cold)


@pytest.mark.parametrize("seed", range(4))
def test_random_walks_with_aborts_and_flushes(windowed: Windowed, seed: int) -> None:
    """Branches, aborts in prefill and in decode, flushes, retractions: everything together."""
    rng = random.Random(seed)
    family, window = rng.choice(sorted(WINDOWED)), rng.choice([4, 8, 16])
    page_size = rng.choice([1, 4])
    path, cold = windowed(family, window)
    heads = [words(50 + i, rng.randrange(1, 60)) for i in range(3)]
    with Rig(
        path,
        page_size=page_size,
        num_pages=max(14, 400 // page_size),
        window_pages=pool(window, page_size, 3),
        max_prefill_tokens=max(8, rng.choice([page_size, 3 * page_size, 40])),
        overlap=rng.random() < 0.7,
        checkpoint=rng.choice([0, 3]),
        max_running=5,
    ) as rig:
        chats = [list(rng.choice(heads)) for _ in range(6)]
        owner: dict[str, int] = {}
        for _ in range(30):
            chat = rng.randrange(len(chats))
            if chat not in owner.values() and len(chats[chat]) < 150:
                chats[chat] += words(rng.randrange(10**6), rng.randrange(1, 20))
                owner[rig.add(list(chats[chat]), rng.randrange(1, 16))] = chat
            for _ in range(rng.randrange(4)):
                rig.loop.step()
            if owner and rng.random() < 0.15:
                rig.loop.abort(rng.choice(sorted(owner)))
            if rng.random() < 0.05:
                rig.loop.flush()
            for name in [n for n in owner if rig.answers[n].finish is not None]:
                chats[owner.pop(name)] += rig.answers[name].tokens
        rig.loop.run_until_idle()
        check_all(rig, cold)


def tiered(rig: Rig) -> Any:
    """Where the cached tokens of all answers came from."""
    return [answer.sources for answer in rig.answers.values()]


@pytest.mark.parametrize(("family", "window", "page_size"), FEW, ids=str)
def test_tails_come_back_from_the_host(
    windowed: Windowed, family: str, window: int, page_size: int
) -> None:
    """The device holds hardly more than one conversation, the host all of them."""
    path, cold = windowed(family, window)
    with Rig(
        path,
        page_size=page_size,
        num_pages=pages_for_tokens(300, page_size),
        host_pages=pages_for_tokens(2000, page_size),
        window_pages=pool(window, page_size, 2),
        window_host_pages=pages_for_tokens(1000, page_size),
        max_running=3,
    ) as rig:
        run_chats(rig, 11, chats=5, turns=14, most=150)
        assert sum(s.host for s in tiered(rig)) > 0
        check_all(rig, cold)


@pytest.mark.parametrize(("family", "window", "page_size"), FEW[::2], ids=str)
def test_tails_come_back_from_storage(
    windowed: Windowed, tmp_path: Path, family: str, window: int, page_size: int
) -> None:
    """Over two engines on one directory: the second one reads what the first one left."""
    path, cold = windowed(family, window)
    history = words(40, 6 * window + 3)
    for engine in range(2):
        with Rig(
            path,
            page_size=page_size,
            num_pages=pages_for_tokens(300, page_size),
            host_pages=pages_for_tokens(600, page_size),
            window_pages=pool(window, page_size, 4),
            window_host_pages=pages_for_tokens(300, page_size),
            store=tmp_path,
            tiers=TierConfig(prefetch_policy="wait_complete"),
        ) as rig:
            for turn in range(3):
                answer = rig.ask(history, 3)
                if turn == 0 and engine:
                    assert answer.sources.storage > 0
                history = history + answer.tokens + words(300 + 10 * engine + turn, 4)
            check_all(rig, cold)
