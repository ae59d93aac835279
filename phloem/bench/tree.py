"""Speed and memory of the prefix cache, through its public API: locks and page tables included.

What each figure times (page 16, one core):

    match_131072_256_nodes_us   match, reserve (locks 256 nodes), page table, for a path whose every
                                node has a side branch
    rematch_next_turn_us        the same for the next turn (+512 tokens) of a private session
    insert_256_us               the whole next request on the 256-node path: match, reserve 16 more
                                pages, page table, commit, close
    evict_256_leaf16_us         evict 16 pages among 5,000 leaves of one page each
    evict_256_leaf1024_us       the same among leaves of 64 pages
    match_1024_us               match, reserve, page table, for one node
    bytes_per_token             Python heap per cached token after the prompts of conversation_1000
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from phloem.cache import PrefixCache, Reservation
from phloem.core.tokens import tokens_to_bytes

__all__ = ["bytes_per_token", "run", "trace_prompts"]

PAGE = 16
LONG = 131_072
STEP = 512
NAMESPACE = b"bench"
UNLIMITED_PAGES = 1 << 24

Samples: TypeAlias = list[float]


def run(quick: bool = False) -> dict[str, Any]:
    """All figures: medians, with the raw samples beside them."""
    few, many = (20, 50) if quick else (100, 500)
    num_leaves = 1000 if quick else 5000
    timed: dict[str, Samples] = {
        "match_131072_256_nodes_us": _match_path(few),
        "rematch_next_turn_us": _next_turn(few),
        "insert_256_us": _insert(few),
        "evict_256_leaf16_us": _evict(few, num_leaves, 16),
        "evict_256_leaf1024_us": _evict(few, num_leaves, 1024),
        "match_1024_us": _match_short(many),
    }
    results: list[dict[str, Any]] = [
        {
            "name": name,
            "value": round(statistics.median(samples), 2),
            "unit": "us",
            "samples": [round(sample, 2) for sample in samples],
        }
        for name, samples in timed.items()
    ]
    trace = find_trace()
    if trace is not None:
        value = round(bytes_per_token(trace_prompts(trace)), 3)
        results.append(
            {"name": "bytes_per_token", "value": value, "unit": "B/token", "samples": [value]}
        )
    return {"bench": "tree", "results": results}


def find_trace(name: str = "conversation_1000.jsonl") -> Path | None:
    """The trace beside the checkout (or under PHLOEM_SHARED), if it is there."""
    roots = [Path(__file__).resolve().parents[2].parent / "shared", Path.cwd().parent / "shared"]
    if "PHLOEM_SHARED" in os.environ:
        roots.insert(0, Path(os.environ["PHLOEM_SHARED"]))
    for root in roots:
        path = root / "data" / "mini" / name
        if path.is_file():
            return path
    return None


def trace_prompts(path: Path) -> list[bytes]:
    """Packed prompts of a trace: 16 tokens per hash id, drawn from a PRNG seeded by the id."""
    prompts = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            ids: list[int] = []
            for hash_id in record["hash_ids"]:
                rng = random.Random(hash_id)
                ids.extend(rng.randrange(32_000) for _ in range(PAGE))
            prompts.append(tokens_to_bytes(ids[: record["input_length"]]))
    return prompts


def bytes_per_token(prompts: list[bytes]) -> float:
    """Heap that an unlimited cache takes for the prompts, per token that it then holds.

    Every prompt is held by the caller too, as in a server it is not; so nothing of it is counted.
    """
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    cache = PrefixCache(page_size=PAGE, num_pages=(UNLIMITED_PAGES,))
    for prompt in prompts:
        _put(cache, prompt)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / (cache.evictable_pages * PAGE)


def _tokens(rng: random.Random, count: int) -> bytes:
    return tokens_to_bytes([rng.randrange(32_000) for _ in range(count)])


def _put(cache: PrefixCache, tokens: bytes) -> None:
    match = cache.match(NAMESPACE, tokens)
    num_pages = len(tokens) // 4 // PAGE
    with cache.reserve(match, num_pages - match.num_pages) as reservation:
        reservation.commit(tokens)


def _branched(rng: random.Random) -> tuple[PrefixCache, bytes]:
    """A path of 256 nodes of 512 tokens: at the end of each but the last, another path leaves."""
    cache = PrefixCache(page_size=PAGE, num_pages=(UNLIMITED_PAGES,))
    tokens = _tokens(rng, LONG)
    _put(cache, tokens)
    for end in range(STEP, LONG, STEP):
        _put(cache, tokens[: 4 * end] + _tokens(rng, PAGE))
    return cache, tokens


def _time_us(action: Callable[[], Reservation | None], repeats: int) -> Samples:
    """Time an action; what it returns is closed outside the measured time."""
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        opened = action()
        samples.append((time.perf_counter() - start) * 1e6)
        if opened is not None:
            opened.close()
    return samples


def _hit(cache: PrefixCache, tokens: bytes) -> Callable[[], Reservation]:
    def action() -> Reservation:
        reservation = cache.reserve(cache.match(NAMESPACE, tokens), 0)
        _ = reservation.refs
        return reservation

    return action


def _match_path(repeats: int) -> Samples:
    cache, tokens = _branched(random.Random(1))
    assert cache.match(NAMESPACE, tokens).num_tokens == LONG
    return _time_us(_hit(cache, tokens), repeats)


def _next_turn(repeats: int) -> Samples:
    rng = random.Random(2)
    cache = PrefixCache(page_size=PAGE, num_pages=(UNLIMITED_PAGES,))
    tokens = _tokens(rng, LONG)
    for end in range(STEP, LONG + 1, STEP):
        _put(cache, tokens[: 4 * end])
    return _time_us(_hit(cache, tokens + _tokens(rng, STEP)), repeats)


def _insert(repeats: int) -> Samples:
    rng = random.Random(3)
    cache, tokens = _branched(rng)
    samples = []
    for _ in range(repeats):
        prompt = tokens + _tokens(rng, 256)

        def action(prompt: bytes = prompt) -> None:
            match = cache.match(NAMESPACE, prompt)
            with cache.reserve(match, 256 // PAGE) as reservation:
                _ = reservation.refs
                reservation.commit(prompt)

        samples += _time_us(action, 1)
    return samples


def _evict(repeats: int, num_leaves: int, leaf_tokens: int) -> Samples:
    rng = random.Random(4)
    cache = PrefixCache(page_size=PAGE, num_pages=(UNLIMITED_PAGES,))
    head = _tokens(rng, STEP)
    for _ in range(num_leaves):
        _put(cache, head + rng.randbytes(4 * leaf_tokens))

    def action() -> None:
        assert cache.evict(256 // PAGE) == 256 // PAGE

    samples = []
    for _ in range(repeats):
        samples += _time_us(action, 1)
        _put(cache, head + rng.randbytes(4 * max(leaf_tokens, 256)))
    return samples


def _match_short(repeats: int) -> Samples:
    """Eight prompts per sample: one alone is too short for the clock."""
    rng = random.Random(5)
    cache = PrefixCache(page_size=PAGE, num_pages=(UNLIMITED_PAGES,))
    prompts = [_tokens(rng, 1024) for _ in range(8)]
    for prompt in prompts:
        _put(cache, prompt)
    samples = []
    for _ in range(repeats):
        opened = []
        start = time.perf_counter()
        for prompt in prompts:
            reservation = cache.reserve(cache.match(NAMESPACE, prompt), 0)
            _ = reservation.refs
            opened.append(reservation)
        samples.append((time.perf_counter() - start) * 1e6 / len(prompts))
        for reservation in opened:
            reservation.close()
    return samples
