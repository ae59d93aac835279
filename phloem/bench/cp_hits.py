"""What a cache that several ranks share holds, and how often it hits.

    capacity_ratio_cp2, _cp4       bytes of different tokens that are cached when all pools are
                                   full, against one rank with the same memory per rank
    hit_ratio_cp4_over_one         cached tokens of recorded traces on 4 ranks with a quarter of the
                                   pages each, against one rank with all; the least over all traces
                                   and pool sizes
    hits_sharded_over_replicated   cached tokens of 16 agent sessions on 2 ranks of 512 pages that
                                   own different pages, against 2 that hold the same ones

The real loop, scheduler, cache and placement over a worker that computes nothing; requests come one
after another.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from phloem.bench.tree import find_trace
from phloem.cache import PrefixCache
from phloem.core.clock import VirtualClock
from phloem.core.namespace import make_namespace
from phloem.core.request import GenerateRequest, OutputChunk, SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.kv.sizing import num_pages_for
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.loop import EngineLoop
from phloem.sched import Scheduler, SchedulerConfig
from phloem.sim import CostWorker, Ranks, TraceRequest, read_trace, replay, simulated_target

__all__ = [
    "TRACES",
    "cached_bytes",
    "cached_tokens",
    "capacity_ratio",
    "figures",
    "hit_ratio_over_one",
    "sharded_over_replicated",
]

TRACES = ("claude_code_16sessions", "conversation_1000", "synthetic_1000")
AGENTS = TRACES[0]
SHARDED_PAGES = 512  # a rank
PAGE_SIZE = 16
RANK_BYTES = 64 << 20
PROMPT_PAGES = 24
OVERFILL = 1.5
VOCAB_SIZE = 32_000

SPEC = KVSpec(  # SmolLM2-135M
    kind=AttentionKind.GQA,
    dtype=KVDtype.BF16,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    page_size=PAGE_SIZE,
)


def figures() -> dict[str, float | None]:
    """All figures of this bench by name; None: the traces are not there."""
    paths = [find_trace(f"{name}.jsonl") for name in TRACES]
    traces = [path for path in paths if path is not None]
    whole = len(traces) == len(TRACES)
    return {
        "capacity_ratio_cp2": capacity_ratio(2),
        "capacity_ratio_cp4": capacity_ratio(4),
        "hit_ratio_cp4_over_one": hit_ratio_over_one(4, traces) if whole else None,
        "hits_sharded_over_replicated": sharded_over_replicated(traces[0]) if whole else None,
    }


def capacity_ratio(num_ranks: int, placement: str = "striped") -> float:
    """Bytes of different tokens on so many ranks over those on one, each with RANK_BYTES."""
    several = cached_bytes(Ranks(count=num_ranks, placement=placement))
    return several / cached_bytes(Ranks())


def cached_bytes(ranks: Ranks) -> int:
    """Fill the pools of all ranks well past full; how much of it a next turn would find."""
    pools = (num_pages_for(SPEC, RANK_BYTES),) * ranks.count
    cache = PrefixCache(page_size=PAGE_SIZE, num_pages=pools, placement=ranks.placement)
    loop = EngineLoop(
        Scheduler(SchedulerConfig(max_model_len=1 << 20), cache),
        CostWorker(VirtualClock()),
        VirtualClock(),
        _nobody_reads,
    )
    namespace = make_namespace(model="bench")
    prompts = [_prompt(number) for number in range(int(OVERFILL * sum(pools) / PROMPT_PAGES))]
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        loop.add(
            GenerateRequest(
                request_id=str(number), tokens=prompt, sampling=sampling, namespace=namespace
            )
        )
        loop.run_until_idle()
    return sum(cache.match(namespace, each).num_tokens for each in prompts) * SPEC.token_bytes


def cached_tokens(trace: Sequence[TraceRequest], num_pages: int, ranks: Ranks) -> int:
    """Cached tokens of a trace, on ranks with `num_pages` each."""
    target = simulated_target(num_pages=num_pages, ranks=ranks, page_size=PAGE_SIZE)
    return replay(trace, page_size=PAGE_SIZE, target=target).cached_tokens


def hit_ratio_over_one(
    num_ranks: int, paths: Sequence[Path], placement: str = "striped", most_pages: int | None = None
) -> float:
    """The least ratio over the traces and pool sizes (up to `most_pages`) that are on record."""
    ratios = []
    for path in paths:
        trace = list(read_trace(path))
        limits = json.loads(path.with_suffix(".expected.json").read_text(encoding="utf-8"))["lru"]
        for pages in map(int, limits):
            if most_pages is None or pages <= most_pages:
                one = cached_tokens(trace, pages, Ranks())
                ranks = Ranks(count=num_ranks, placement=placement)
                ratios.append(cached_tokens(trace, pages // num_ranks, ranks) / one)
    return min(ratios)


def sharded_over_replicated(path: Path, placement: str = "striped") -> float:
    """Cached tokens of two ranks that share a cache, over two that hold the same."""
    trace = list(read_trace(path))
    sharded, replicated = (
        cached_tokens(trace, SHARDED_PAGES, Ranks(count=2, placement=name))
        for name in (placement, "replicate")
    )
    return sharded / replicated


def _prompt(number: int) -> bytes:
    rng = random.Random(number)
    return tokens_to_bytes([rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_PAGES * PAGE_SIZE)])


def _nobody_reads(chunks: Sequence[OutputChunk]) -> None:
    """The answers are of no interest."""
