"""From measured pairs to the named figures of the report.

`X_over_PEER` is Phloem's median over the peer's, in one interleaved run: of rates more is better,
of times less. `X_over_best` is the ratio against the peer that Phloem does worst against.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from phloem.bench.compare.pair import Measured, TraceRun
from phloem.bench.compare.roofline import Ceiling, decode_bytes, prefill_flops
from phloem.bench.compare.rounds import median_ratio
from phloem.bench.report import Result, percentile, summary
from phloem.config.model import ModelConfig

__all__ = ["figures_of", "roofline_figures"]

_TIMES = ("second_turn_1024", "second_turn_4096", "restart")
_CONTEXT_TOKENS, _PREFILL_TOKENS = 512, 2048


def figures_of(pairs: Sequence[Measured]) -> list[Result]:
    """All figures of all pairs, ratios first."""
    ratios = [result for pair in pairs for result in _ratios(pair)]
    return [*ratios, *_over_best(ratios), *(r for pair in pairs for r in _absolute(pair))]


def roofline_figures(
    pairs: Sequence[Measured], config: ModelConfig, ceiling: Ceiling
) -> list[Result]:
    """Which part of the machine's measured bandwidth and matrix speed is reached, in bf16."""
    decode = _ours(pairs, "decode_b1")
    prefill = _ours(pairs, f"prefill_{_PREFILL_TOKENS}")
    read = decode_bytes(config, _CONTEXT_TOKENS)
    flops = prefill_flops(config, _PREFILL_TOKENS)
    return [
        Result(name="read_bytes_s", value=ceiling.read_bytes_s, unit="bytes/s"),
        Result(name="matmul_flops", value=ceiling.flops, unit="FLOP/s"),
        Result(
            name="decode_bandwidth_fraction",
            value=None if decode is None else decode * read / ceiling.read_bytes_s,
            unit="ratio",
        ),
        Result(
            name="prefill_flops_fraction",
            value=None if prefill is None else prefill * flops / ceiling.flops,
            unit="ratio",
        ),
    ]


def _ours(pairs: Iterable[Measured], task: str) -> float | None:
    """The median of our samples in bf16, over all pairs."""
    samples = [
        x
        for pair in pairs
        if pair.ours == "phloem" and task in pair.pairs
        for x in pair.pairs[task].ours
    ]
    return statistics.median(samples) if samples else None


def _ratios(pair: Measured) -> list[Result]:
    sides = (pair.ours, pair.peer.name)
    out = [
        median_ratio(f"{_figure(pair, task)}_over_{pair.peer.key}", samples, sides)
        for task, samples in pair.pairs.items()
    ]
    busy, quiet = (pair.pairs.get(name) for name in ("decode_b1_busy_core", "decode_b1"))
    if busy is not None and quiet is not None:
        for side, ours in ((pair.ours, True), (pair.peer.name, False)):
            a, b = (p.ours if ours else p.theirs for p in (busy, quiet))
            name = f"{side}_vs_{pair.peer.key}_busy_core_over_quiet"
            value = statistics.median(a) / statistics.median(b)
            out.append(Result(name=name, value=value, unit="ratio"))
    mine, theirs = (pair.peak_rss.get(side) for side in sides)
    if mine is not None and theirs:
        name = f"peak_rss_over_{pair.peer.key}"
        samples = {sides[0]: mine, sides[1]: theirs}
        out.append(Result(name=name, value=mine / theirs, unit="ratio", samples=samples))
    return out + _trace_ratios(pair)


def _figure(pair: Measured, task: str) -> str:
    name = {"restart": "restart_ttft"}.get(task, task.replace("second_turn_", "second_turn_ttft_"))
    return f"{name}_q4" if pair.ours.endswith("q4") else name


def _trace_ratios(pair: Measured) -> list[Result]:
    if not pair.traces:
        return []
    ours, theirs, *tiered = pair.traces
    below = {run.tier: run for run in tiered}
    # Who keeps what falls out of its pool in other memory is compared with our host tier.
    equal = below.pop("host_tier") if pair.peer.key == "llama_cpp" else ours
    runs = {"agent_trace": equal, **{f"agent_trace_{tier}": run for tier, run in below.items()}}
    out = []
    for name, run in runs.items():
        for figure in ("mean_ttft", "p99_ttft", "tok_s"):
            value = _trace_figure(run, figure) / _trace_figure(theirs, figure)
            samples = {r.side: _per_part(r, figure) for r in (run, theirs)}
            full = f"{name}_{figure}_over_{pair.peer.key}"
            out.append(Result(name=full, value=value, unit="ratio", samples=samples))
    return out


def _over_best(ratios: Sequence[Result]) -> list[Result]:
    """The issue of "the best peer": the largest of our time ratios."""
    stems = {
        "second_turn_ttft_over_best": "second_turn_ttft_1024",
        "second_turn_ttft_4096_over_best": "second_turn_ttft_4096",
        "restart_ttft_over_recompute": "restart_ttft",
        "agent_trace_mean_ttft_over_best": "agent_trace_mean_ttft",
        "agent_trace_p99_ttft_over_best": "agent_trace_p99_ttft",
        "agent_trace_storage_mean_ttft_over_best": "agent_trace_storage_mean_ttft",
        "agent_trace_storage_p99_ttft_over_best": "agent_trace_storage_p99_ttft",
    }
    out = []
    for name, stem in stems.items():
        known = {
            r.name: r.value
            for r in ratios
            if r.value is not None and r.name.replace("_q4", "").startswith(f"{stem}_over_")
        }
        if known:
            worst = max(known, key=lambda one: known[one])
            out.append(Result(name=name, value=known[worst], unit="ratio", samples=known))
    return out


def _absolute(pair: Measured) -> list[Result]:
    """Both sides' own figures, as they were measured beside each other."""
    out = []
    for task, samples in pair.pairs.items():
        for side, values in ((pair.ours, samples.ours), (pair.peer.name, samples.theirs)):
            name = f"{_label(pair, side)}_{task}"
            out.append(summary(name, values, pair.units[task]))
    for run in pair.traces:
        for figure in ("mean_ttft", "p99_ttft", "tok_s", "hit_rate"):
            value = _trace_figure(run, figure)
            unit = {"tok_s": "tokens/s", "hit_rate": "ratio"}.get(figure, "s")
            name = f"{_label(pair, run.side)}_{figure}"
            out.append(Result(name=name, value=value, unit=unit))
    for role, peak in pair.peak_rss.items():
        name = f"{_label(pair, role)}_peak_rss"
        out.append(Result(name=name, value=peak, unit="bytes"))
    return out


def _label(pair: Measured, side: str) -> str:
    """Our own figures exist once for each pair."""
    name = side.replace(", ", "_").replace(" ", "_")
    return f"{name}_beside_{pair.peer.key}" if side.startswith("phloem") else name


def _trace_figure(run: TraceRun, figure: str) -> float:
    ttft = [t for part in run.parts for t in part.ttft_s]
    match figure:
        case "mean_ttft":
            return statistics.fmean(ttft)
        case "p99_ttft":
            return percentile(ttft, 99)
        case "tok_s":
            return sum(p.tokens for p in run.parts) / sum(p.seconds for p in run.parts)
        case _:
            cached = sum(p.cached_tokens or 0 for p in run.parts)
            return cached / sum(p.tokens for p in run.parts)


def _per_part(run: TraceRun, figure: str) -> list[float]:
    parts = [TraceRun(side=run.side, parts=(part,)) for part in run.parts]
    return [round(_trace_figure(part, figure), 6) for part in parts]
