"""Any way through the cache gives what no cache gives: tokens, logits, page bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from phloem.core.request import FinishReason
from tests.parity.rig import Cold, Rig, check_all

PAGES = [1, 4, 16]


def words(seed: int, count: int) -> list[int]:
    """Random token ids (2 ... 319: no special ones)."""
    rng = random.Random(seed)
    return [rng.randrange(2, 320) for _ in range(count)]


@pytest.mark.parametrize("page_size", PAGES)
def test_o01_a_prompt_cached_whole_computes_its_last_token(
    tiny: Path, cold: Cold, page_size: int
) -> None:
    """Lengths around page borders, three times each; then the answer continued as a new turn."""
    p = page_size
    for n in sorted({max(1, p - 1), p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 5 * p}):
        with Rig(tiny, page_size=p, num_pages=1024 // p) as rig:
            prompt = words(n, n)
            answers = [rig.ask(prompt, 3 * p) for _ in range(3)]
            full = (n - 1) // p * p
            assert [a.cached for a in answers] == [0, full, full]
            turn = prompt + answers[-1].tokens + words(99, 2)
            # The last sampled token was never computed; every full page before it was.
            reusable = (n + 3 * p - 1) // p * p
            assert rig.ask(turn, 4).cached == reusable
            check_all(rig, cold)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", PAGES)
def test_o03_same_prefix_at_once_while_freed_pages_are_reused(
    tiny: Path, cold: Cold, page_size: int, overlap: bool
) -> None:
    p = page_size
    with Rig(
        tiny,
        page_size=p,
        num_pages=max(24, 160 // p),
        max_prefill_tokens=2 * p,
        overlap=overlap,
        max_running=4,
    ) as rig:
        shared = words(1, 4 * p)
        rig.add(shared + words(2, p + 1), 4 * p)
        rig.add(shared + words(3, 2 * p + 1), 4 * p)
        for i in range(12):
            rig.add(words(100 + i, p + 1), 2)
            rig.loop.step()
        rig.loop.run_until_idle()
        match = rig.cache.match(next(iter(rig.recorder.inits.values())).tokens, b"")
        assert match.num_pages == 0  # an unknown namespace holds nothing
        check_all(rig, cold)


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("chunk_pages", [1, 2, 3])
def test_chunked_prefill_equals_one_chunk(
    tiny: Path, cold: Cold, page_size: int, chunk_pages: int
) -> None:
    """Prompts of 1 ... 10 pages in chunks of 1 ... 3, two at a time, then a longer second turn."""
    p = page_size
    with Rig(tiny, page_size=p, num_pages=1024 // p, max_prefill_tokens=chunk_pages * p) as rig:
        first, second = words(11, 10 * p + 1), words(12, 7 * p)
        ids = [rig.add(first, 5), rig.add(second, 5)]
        rig.loop.run_until_idle()
        assert rig.recorder.num_chunks >= (0 if p == 1 else 10 // chunk_pages)
        turn = first + rig.answers[ids[0]].tokens + words(13, 3 * p)
        assert rig.ask(turn, 5).cached >= 10 * p
        check_all(rig, cold)


@pytest.mark.parametrize("page_size", PAGES)
def test_o07_retraction_loses_nothing(tiny: Path, cold: Cold, page_size: int) -> None:
    """More requests than pages: several are put back, some while they prefill."""
    p = page_size
    with Rig(
        tiny, page_size=p, num_pages=max(9, 160 // p), max_prefill_tokens=max(16, 2 * p)
    ) as rig:
        for i in range(6):
            rig.add(words(20 + i, 5 + 11 * i), 60)
        rig.loop.run_until_idle()
        assert rig.loop.stats().retractions_total > 0
        assert all(a.finish is FinishReason.LENGTH for a in rig.answers.values())
        check_all(rig, cold)


@pytest.mark.parametrize("page_size", PAGES)
def test_o13_salts_share_nothing(tiny: Path, cold: Cold, page_size: int) -> None:
    prompt = words(30, 5 * page_size + 1)
    with Rig(tiny, page_size=page_size, num_pages=1024 // page_size) as rig:
        assert rig.ask(prompt, 2, salt="a").cached == 0
        assert rig.ask(prompt, 2, salt="b").cached == 0
        assert rig.ask(prompt, 2).cached == 0
        assert rig.ask(prompt, 2, salt="a").cached == 5 * page_size
        check_all(rig, cold)


@pytest.mark.parametrize("page_size", PAGES)
def test_o29_a_needle_in_the_cached_part_is_read(tiny: Path, cold: Cold, page_size: int) -> None:
    """Two prompts that differ in one early token only: hits on each give each one's own answer."""
    p = page_size
    tail = words(41, 2 * p)
    with Rig(tiny, page_size=p, num_pages=2048 // p) as rig:
        for pages in range(1, 6):
            head = words(40 + pages, pages * p)
            other = [*head]
            other[0] = 2 + (head[0] - 1) % 318
            for prompt in (head, other):
                rig.ask(prompt, 1)
                assert rig.ask(prompt + tail, 3).cached >= (pages * p - 1) // p * p
        check_all(rig, cold)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("page_size", PAGES)
def test_random_conversations_in_a_small_pool(
    tiny: Path, cold: Cold, page_size: int, seed: int
) -> None:
    """Branching chats, shared heads, aborts, flushes, chunks: everything together."""
    rng = random.Random(1000 * page_size + seed)
    p = page_size
    heads = [words(50 + i, rng.randrange(1, 60)) for i in range(3)]
    with Rig(
        tiny,
        page_size=p,
        num_pages=max(14, 320 // p),
        max_prefill_tokens=rng.choice([p, 3 * p, 40]),
        overlap=rng.random() < 0.7,
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
