"""Interleaved rounds: A B A B, so that a slow minute of the machine hits both sides."""

from __future__ import annotations

import os
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from phloem.bench.report import Result, percentile

__all__ = ["Measure", "Pairs", "interleave", "median_ratio"]

Measure = Callable[[int], Awaitable[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Rounds of one figure; `load` is the machine's load average (1 min) before each round."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    load: tuple[float, ...]

    def as_json(self, sides: tuple[str, str]) -> dict[str, Any]:
        """Raw samples by the names of the two sides."""
        return {
            sides[0]: [round(x, 6) for x in self.ours],
            sides[1]: [round(x, 6) for x in self.theirs],
            "load_average": list(self.load),
        }


async def interleave(rounds: int, ours: Measure, theirs: Measure) -> Pairs:
    """Measure both sides in turn, `rounds` times."""
    a, b, load = [], [], []
    for number in range(rounds):
        load.append(round(os.getloadavg()[0], 2))
        a.append(await ours(number))
        b.append(await theirs(number))
    return Pairs(ours=tuple(a), theirs=tuple(b), load=tuple(load))


def median_ratio(name: str, pairs: Pairs, sides: tuple[str, str]) -> Result:
    """Median of ours over median of theirs; the spread is that of the rounds' own ratios."""
    ratios = [a / b for a, b in zip(pairs.ours, pairs.theirs, strict=True)]
    return Result(
        name=name,
        value=statistics.median(pairs.ours) / statistics.median(pairs.theirs),
        unit="ratio",
        samples=pairs.as_json(sides),
        spread=(percentile(ratios, 10), percentile(ratios, 90)),
    )
