"""From spans to milliseconds per decode step, by what was done."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phloem.bench.profile.points import IDLE, OUTSIDE_GROUPS, STEP
from phloem.bench.profile.spans import Span, exclusive_ns

__all__ = ["Row", "StepReport", "decode_report"]

_EDGE = 4  # steps left out at both ends: rows arrive and leave there


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One name: calls per step, and its exclusive milliseconds in each, passed and on a CPU."""

    name: str
    group: str
    calls: float
    ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Decode steps of one batch size.

    `step_ms`: from a step's start to the next one's; `gap_ms`: how long of it the worker waited
    for its next plan. `outside_ms`: work of scheduler, log, IPC and detokenizer, most of it done
    beside the running step, and `outside_cpu_ms` how long of that it had a core.
    """

    batch: int
    step_ms: tuple[float, ...]
    gap_ms: tuple[float, ...]
    outside_ms: tuple[float, ...]
    outside_cpu_ms: tuple[float, ...]
    rows: tuple[Row, ...]  # the longest first


def decode_report(spans: Sequence[Span], batch: int) -> StepReport | None:
    """The steps in which `batch` rows had one token each; None if there were too few."""
    steps = sorted(
        (s for s in spans if s.group == STEP and s.args["rows"] == s.args["tokens"] == batch),
        key=lambda s: s.start_ns,
    )[_EDGE:-_EDGE]
    if len(steps) < 2:
        return None
    starts = [step.start_ns for step in steps]
    num = len(steps) - 1
    calls: Counter[tuple[str, str]] = Counter()
    by_step: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * num)
    cpu_by_step: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * num)
    for span, (own, cpu) in zip(spans, exclusive_ns(spans), strict=True):
        number = bisect.bisect_right(starts, span.start_ns) - 1
        if span.group != IDLE and 0 <= number < num:
            calls[span.group, span.name] += 1
            by_step[span.group, span.name][number] += own / 1e6
            cpu_by_step[span.group, span.name][number] += cpu / 1e6
    rows = [
        Row(
            name=name,
            group=group,
            calls=calls[group, name] / num,
            ms=tuple(ms),
            cpu_ms=tuple(cpu_by_step[group, name]),
        )
        for (group, name), ms in by_step.items()
    ]
    outside = [row for row in rows if row.group in OUTSIDE_GROUPS]
    return StepReport(
        batch=batch,
        step_ms=tuple((b - a) / 1e6 for a, b in itertools.pairwise(starts)),
        gap_ms=tuple((b - a.end_ns) / 1e6 for a, b in zip(steps, starts[1:], strict=False)),
        outside_ms=_sums(row.ms for row in outside),
        outside_cpu_ms=_sums(row.cpu_ms for row in outside),
        rows=tuple(sorted(rows, key=lambda row: -statistics.median(row.ms))),
    )


def _sums(rows: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """Over all rows, step by step."""
    return tuple(map(sum, zip(*rows, strict=True)))
