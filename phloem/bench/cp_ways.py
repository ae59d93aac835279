"""What choosing the way of every step anew gains, and what it costs.

All sides run the same code over random weights of SmolLM2-135M's shape.

Processes of one machine, whose pools are mapped, one thread each, all 30 layers; rounds in which
each engine answers once, in turn:

    auto_over_direct_*     seconds of `--remote-kv auto` over those of `direct`, for a prefill and
                           for decodes on a short and a long context
    send_q_over_direct_*   the same of `send_q`

Two ranks over a simulated link, threads of one process, NUM_LAYERS layers, nothing read in place:

    auto_over_best_*       seconds of a step in the ways that the leader picks by what was measured,
                           over the fastest of the four pairs of ways; 1: it picks that one
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from phloem.bench.cp_engines import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    BenchEngine,
    EngineShape,
    open_engines,
    random_prompt,
    write_random_model,
)
from phloem.bench.cp_linked import PAGE_SIZE, LinkedRanks, open_linked
from phloem.bench.report import Result
from phloem.cache.remote_choice import RemoteChooser, RemoteModel
from phloem.cache.remote_cost import LayerShape
from phloem.core.plan import RowPlan
from phloem.core.remote import Remote, RemoteWays

__all__ = ["measure_ways"]

NUM_LAYERS = 4
CHUNK, LENGTH = 2048, 10240
LINK_LATENCY_S, LINK_BYTES_S = 1e-4, 1e9
STEPS = {"64_on_8k": (8192, 64), "2k_on_8k": (8192, 2048), "1_on_8k": (8192, 1), "2k": (0, 2048)}
BF16, FP32 = 2, 4
LAYER = LayerShape(
    kv_bytes=2 * KV_HEADS * HEAD_DIM * BF16,
    q_bytes=HEADS * HEAD_DIM * BF16,
    partial_bytes=HEADS * (HEAD_DIM + 1) * FP32,
)
DECODES = 16
ENGINES = ("direct", "send_q", "auto")
PAIRS = tuple(
    RemoteWays(cached=cached, own=own)
    for cached, own in itertools.product((Remote.GATHER_KV, Remote.SEND_Q), repeat=2)
)


def measure_ways(*, quick: bool = False) -> list[Result]:
    """About five minutes (quick: one, with shorter contexts)."""
    rounds = 3 if quick else 9
    with tempfile.TemporaryDirectory(prefix="phloem-cp-") as folder:
        few = write_random_model(Path(folder, "few"), num_layers=NUM_LAYERS)
        with open_linked(few, LENGTH, chunk=CHUNK) as ranks:
            results = _over_a_link(ranks, rounds)
        many = write_random_model(Path(folder, "many"), num_layers=30)
        contexts = (512, 4096) if quick else (512, 4096, 16384)
        return [*results, *_mapped(many, contexts, rounds)]


def _over_a_link(ranks: LinkedRanks, rounds: int) -> list[Result]:
    ranks.link.latency_s, ranks.link.bytes_s = LINK_LATENCY_S, LINK_BYTES_S
    rates = replace(ranks.measure(), read_bytes_s=0.0)
    model = RemoteModel(ranks=2, page_size=PAGE_SIZE, layer=LAYER, rates=rates)
    ranks.prefill(PAIRS[0])
    results = []
    for name, (cached, new) in STEPS.items():
        row = RowPlan(row=0, serial=0, start=cached, count=new, tokens=None, sample=False)
        picked = RemoteChooser(model=model).choose(0, [row])
        samples: dict[RemoteWays, list[float]] = {ways: [] for ways in PAIRS}
        for _ in range(rounds + 1):
            for ways, seconds in samples.items():
                seconds.append(ranks.step(ways, cached=cached, new=new))
        medians = {ways: statistics.median(each[1:]) for ways, each in samples.items()}
        facts = {str(ways): round(seconds, 5) for ways, seconds in medians.items()}
        results.append(
            Result(
                name=f"auto_over_best_{name}",
                value=round(medians[picked] / min(medians.values()), 4),
                unit="ratio",
                samples={"picked": str(picked), **facts},
            )
        )
    return results


def _mapped(model: Path, contexts: tuple[int, ...], rounds: int) -> list[Result]:
    shapes = [EngineShape(cp=2, remote_kv=ways) for ways in ENGINES]
    rng = random.Random(6)
    results = []
    with open_engines(model, *shapes) as opened:
        engines = dict(zip(ENGINES, opened, strict=True))
        for context in contexts:
            prompt = random_prompt(rng, context)
            for engine in engines.values():
                engine.answer(prompt)  # from now on all of it is cached
            results += _compared(f"decode_{context}", engines, _decode(prompt), rounds)
        results += _compared("prefill_2048", engines, _prefill(rng), rounds)
    return results


def _decode(prompt: list[int]) -> Callable[[BenchEngine], float]:
    """A token after a cached prompt; of many less one, so that the rest of its last page is not
    counted."""
    return lambda engine: engine.answer(prompt, 1 + DECODES) - engine.answer(prompt, 1)


def _prefill(rng: random.Random) -> Callable[[BenchEngine], float]:
    return lambda engine: engine.answer(random_prompt(rng, 2048))


def _compared(
    name: str,
    engines: Mapping[str, BenchEngine],
    run: Callable[[BenchEngine], float],
    rounds: int,
) -> list[Result]:
    samples = [{ways: run(engine) for ways, engine in engines.items()} for _ in range(rounds)]
    return [
        Result(
            name=f"{ways}_over_direct_{name}",
            value=round(statistics.median(each[ways] / each["direct"] for each in samples), 4),
            unit="ratio",
            samples=[{way: round(seconds, 5) for way, seconds in each.items()} for each in samples],
        )
        for ways in ENGINES[1:]
    ]
