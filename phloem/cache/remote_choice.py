"""The leader's choice, step by step, of how ranks read each other's pages; and why.

    rows of the plan -> shape of the step -> seconds of a layer in every pair of ways -> the plan

Only the leader reads what was measured, and the step plan alone carries what it has chosen: so
ranks cannot differ in it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from phloem.cache.remote_cost import LayerShape, RemoteChoice, StepShape, priced_ways
from phloem.core.plan import RowPlan
from phloem.core.remote import IN_PLACE, LinkRates, RemoteWays
from phloem.core.stats import RemoteStats

__all__ = ["RemoteChooser", "RemoteDecision", "RemoteModel"]

# Figures of a fraction of a second are off by so much: who reads in place goes on doing so until
# something else promises more.
MARGIN = 0.1
# Memory that is read at this share of one's own rate is as near, and nothing but reading it in
# place has been measured to gain.
NEAR = 0.5
REMEMBERED = 256  # newest decisions
MEMO = 4096  # shapes whose choice is kept
DIGITS = 4  # significant bits of a shape


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """What ways are chosen by: the ranks, a layer of the model, and what was measured."""

    ranks: int
    page_size: int
    layer: LayerShape
    rates: LinkRates

    def price(self, step: StepShape) -> tuple[RemoteChoice, ...]:
        """All that can be chosen, the one that is chosen first."""
        choices = priced_ways(step, self.layer, self.rates)
        near = self.rates.read_bytes_s >= NEAR * self.rates.memory_bytes_s
        limit_s = math.inf if near else choices[0].layer_s * (1 + MARGIN)
        for at, choice in enumerate(choices):
            if choice.ways == IN_PLACE and choice.layer_s <= limit_s:
                return (choice, *choices[:at], *choices[at + 1 :])
        return choices


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteDecision:
    """One step. `choices`: what a layer was expected to take in every way, the chosen one first;
    shapes are rounded to a few significant bits before they are priced."""

    step: int
    requests: int
    new_tokens: int
    cached_tokens: int
    choices: tuple[RemoteChoice, ...]


_Key: TypeAlias = tuple[int, ...]  # new, cached, pairs of both, pairs of new, busiest


class RemoteChooser:
    """One per scheduler. Without a `model` it is `ways` in every step."""

    def __init__(self, ways: RemoteWays = IN_PLACE, model: RemoteModel | None = None) -> None:
        self.model = model
        self._ways = ways
        self._counts: Counter[RemoteWays] = Counter()
        self._kept: deque[RemoteDecision] = deque(maxlen=REMEMBERED)
        self._memo: dict[_Key, tuple[RemoteChoice, ...]] = {}

    def choose(self, step: int, rows: Iterable[RowPlan]) -> RemoteWays:
        """How the ranks read in `step`."""
        if self.model is None:
            self._counts[self._ways] += 1
            return self._ways
        page_size = self.model.page_size
        requests = new = cached = seen = squares = pages = 0
        for row in rows:
            requests += 1
            new += row.count
            cached += row.start
            seen += row.count * row.start
            squares += row.count * row.count
            pages += -(-row.count // page_size)
        busiest = -(-pages // self.model.ranks) / pages * new  # a page is computed by one rank
        key = tuple(map(_rounded, (new, cached, seen, squares, round(busiest))))
        choices = self._memo.get(key)
        if choices is None:
            if len(self._memo) >= MEMO:
                self._memo.clear()
            choices = self._memo[key] = self.model.price(_shape(self.model.ranks, key))
        self._kept.append(
            RemoteDecision(
                step=step,
                requests=requests,
                new_tokens=new,
                cached_tokens=cached,
                choices=choices,
            )
        )
        ways = choices[0].ways
        self._counts[ways] += 1
        return ways

    def newest(self, limit: int) -> list[RemoteDecision]:
        """The newest decisions, the newest first; none where the way is prescribed."""
        return [self._kept[-i] for i in range(1, min(limit, len(self._kept)) + 1)]

    def stats(self) -> RemoteStats:
        """Steps by the ways that they took, and what these were chosen by."""
        counts = sorted((w.cached.value, w.own.value, n) for w, n in self._counts.items())
        rates = None if self.model is None else self.model.rates
        return RemoteStats(steps_total=tuple(counts), rates=rates)


def _shape(ranks: int, key: _Key) -> StepShape:
    new, cached, seen, squares, busiest = key
    return StepShape(
        ranks=ranks,
        new=new,
        cached=cached,
        seen=min(1.0, seen / (new * cached)) if new and cached else 1.0,
        own_seen=min(1.0, squares / (new * new)) if new else 1.0,
        busiest=max(new / ranks, min(busiest, new)),
    )


def _rounded(number: int) -> int:
    """So that steps that hardly differ are one."""
    shift = max(0, number.bit_length() - DIGITS)
    return number >> shift << shift
