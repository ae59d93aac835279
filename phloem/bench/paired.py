"""Two ways to do the same, compared on a machine that is never quiet.

One sample is a *quad*, A B B A, of some tens of milliseconds each: what the machine does meanwhile
hits both, a steady drift cancels. The figure is the median of the quads' ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Budget", "Quad", "median_interval", "quad", "ratio_result", "result"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quad:
    """Seconds of the two turns of each side."""

    other_s: float
    mine_s: float

    @property
    def ratio(self) -> float:
        """How much faster mine is."""
        return self.other_s / self.mine_s

    def __add__(self, more: Quad) -> Quad:
        return Quad(other_s=self.other_s + more.other_s, mine_s=self.mine_s + more.mine_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long to go on: so many seconds, but at least and at most so many quads."""

    seconds: float
    fewest: int = 5
    most: int = 200

    def turns(self) -> Iterator[int]:
        """0, 1, 2 ... until it is used up."""
        end = time.perf_counter() + self.seconds
        for turn in range(self.most):
            if turn >= self.fewest and time.perf_counter() > end:
                return
            yield turn


def quad(other: Callable[[], None], mine: Callable[[], None], turn: int) -> Quad:
    """A B B A; who is A alternates from turn to turn."""
    a, b = (mine, other) if turn % 2 else (other, mine)
    times = [_seconds(run) for run in (a, b, b, a)]
    outer, inner = times[0] + times[3], times[1] + times[2]
    return Quad(other_s=inner, mine_s=outer) if turn % 2 else Quad(other_s=outer, mine_s=inner)


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ratio_result(name: str, quads: Sequence[Quad]) -> dict[str, Any]:
    """The median ratio; the samples are the ratios."""
    ratios = [each.ratio for each in quads]
    return result(name, statistics.median(ratios), [round(ratio, 4) for ratio in ratios])


def result(name: str, value: float, samples: Any, unit: str = "ratio") -> dict[str, Any]:
    """As a bench answers it."""
    return {"name": name, "value": round(value, 4), "unit": unit, "samples": samples}


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the median, from the order statistics alone."""
    ordered = sorted(samples)
    count = len(ordered)
    reach = 0.98 * count**0.5  # 1.96 standard deviations of a binomial of one half
    low, high = int(count / 2 - reach), int(count / 2 + reach)
    return ordered[max(0, low)], ordered[min(count - 1, high)]
