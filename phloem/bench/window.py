"""`phloem bench window`: what sliding windows cost in memory, hits, bytes moved and decode time.

gemma3_tokens_per_gb_over_limit   kept tokens of 16K prompts, of what the layer mix allows: the
gpt_oss_tokens_per_gb_over_limit  least of device and host, checkpoints off and at their default
hit_points_below_unlimited        hits of a trace with 384 window pages, in points below no limit
tombstone_only_points_below_...   the same with window pages evicted one by one, least recent first
transfer_bytes_ratio              bytes of window layers copied of a 20,480-token prompt, W 4,096,
                                  of a full copy's: the larger of host and storage
decode_16k_over_window            a window layer's decode at 16K context, over the same at W
"""

from __future__ import annotations

from typing import Any

from phloem.bench.report import Result
from phloem.bench.window_capacity import GEMMA3, GPT_OSS, Mix, measure_capacity
from phloem.bench.window_decode import measure_decode
from phloem.bench.window_hits import hit_rates
from phloem.bench.window_transfer import transfer_bytes_ratio

__all__ = ["run"]

_QUICK_PROMPTS = 32


def run(quick: bool = False) -> dict[str, Any]:
    """Measure; about two minutes (quick: less than one, with a smaller memory)."""
    results = []
    for mix in (GEMMA3, GPT_OSS):
        results += _capacity(mix, quick=quick)
    results += _hits()
    results.append(
        Result(name="transfer_bytes_ratio", value=round(transfer_bytes_ratio(), 4), unit="ratio")
    )
    results += measure_decode(rounds=15 if quick else 61)
    return {"bench": "window", "results": [result.as_json() for result in results]}


def _capacity(mix: Mix, *, quick: bool) -> list[Result]:
    sizes = {"num_prompts": _QUICK_PROMPTS} if quick else {}
    cases = {
        f"{place}, {kept}": measure_capacity(
            mix, checkpoints=kept == "checkpoints", host=place == "host", **sizes
        )
        for place in ("device", "host")
        for kept in ("ends", "checkpoints")
    }
    name = f"{mix.name}_tokens_per_gb_over_limit"
    shares = {case: round(found.over_limit, 4) for case, found in cases.items()}
    gains = {case: round(found.over_one_pool, 3) for case, found in cases.items()}
    return [
        Result(name=name, value=min(shares.values()), unit="ratio", samples=shares),
        Result(
            name=f"{mix.name}_tokens_per_gb_over_one_pool",
            value=min(gains.values()),
            unit="ratio",
            samples=gains,
        ),
    ]


def _hits() -> list[Result]:
    rates = hit_rates()

    def below(name: str) -> float | None:
        return None if rates is None else round(100 * (rates["unlimited"] - rates[name]), 2)

    samples = None if rates is None else {name: round(rate, 4) for name, rate in rates.items()}
    return [
        Result(
            name="hit_points_below_unlimited", value=below("kept"), unit="points", samples=samples
        ),
        Result(
            name="tombstone_only_points_below_unlimited",
            value=below("tombstone_only"),
            unit="points",
            samples=samples,
        ),
    ]
