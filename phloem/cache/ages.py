"""Ages: how long pages had not been used when they were hit, and when they were evicted.

Nodes carry log time, which is equal on all ranks; only the leader has a clock. It notes from time
to time which log time it is, and so can date any of them afterwards.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from phloem.core.stats import AGE_BOUNDS_S, AgeStats

__all__ = ["Ages"]

_MOST_NOTES = 4096


class Ages:
    """Histograms of ages, in pages, by what happened and on which tier."""

    __slots__ = ("_counts", "_log_times", "_seconds", "_sums")

    def __init__(self) -> None:
        self._log_times: list[int] = []
        self._seconds: list[float] = []
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._sums: dict[tuple[str, str], float] = {}

    def note(self, log_time: int, now_s: float) -> None:
        """It is `log_time` now. Old notes are thinned out: dates become coarser with age."""
        if self._log_times and self._log_times[-1] == log_time:
            return
        self._log_times.append(log_time)
        self._seconds.append(now_s)
        if len(self._log_times) > _MOST_NOTES:
            half = _MOST_NOTES // 2
            self._log_times[:half] = self._log_times[:half:2]
            self._seconds[:half] = self._seconds[:half:2]

    def happened(self, event: str, tier: str, log_time: int, num_pages: int) -> None:
        """`event` happened to pages that were last used at `log_time`."""
        if not self._log_times:
            return
        at = min(bisect_left(self._log_times, log_time), len(self._seconds) - 1)
        age_s = self._seconds[-1] - self._seconds[at]
        key = event, tier
        counts = self._counts.setdefault(key, [0] * (len(AGE_BOUNDS_S) + 1))
        counts[bisect_right(AGE_BOUNDS_S, age_s)] += num_pages
        self._sums[key] = self._sums.get(key, 0.0) + age_s * num_pages

    def stats(self) -> tuple[AgeStats, ...]:
        """A snapshot."""
        return tuple(
            AgeStats(event=event, tier=tier, counts=tuple(counts), sum_s=self._sums[event, tier])
            for (event, tier), counts in sorted(self._counts.items())
        )
