"""Which way of reading remote pages is the fastest, for a step of a given shape.

A step of N ranks computes `new` tokens over `cached` ones. Each rank owns c = cached / N of these;
the busiest one has n rows: new / N if they are spread evenly, all of them if there is only one. In
a layer of that rank:

    rows   |---- linear ----|---- attention over what is here ----|-- over what came --|
    link   |-- cached pages of the next layer --|   |-- the chunk's own K and V --|    |-- ...

- DIRECT moves nothing; a tile of queries reads remote keys at `read_bytes_s`, where it reads those
  that are here at `memory_bytes_s`.
- GATHER_KV of the cached part is known before the step: layer l + 1 travels while layer l computes,
  so it costs what does not fit behind the computing. The chunk's own K and V exist only after the
  linear part of their layer, and hide behind the attention over everything else.
- SEND_Q moves queries one way and partial results the other, after the linear part. The attention
  is as much as before, but divided by keys: every rank does its N-th of it, however few have rows.

Bytes that leave a rank and bytes that reach it share nothing; each direction is one line of
`latency_s` a message and `bytes_s`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from phloem.core.remote import LinkRates, Remote, RemoteWays

__all__ = [
    "LayerShape",
    "LinkRates",
    "RemoteChoice",
    "StepShape",
    "choose_remote",
    "layer_seconds",
    "priced_ways",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Bytes of one token in one layer: K and V, a query, and a partial result with its LSE.

    `tile`: queries that read a key once when they attend together.
    """

    kv_bytes: int
    q_bytes: int
    partial_bytes: int
    tile: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """One step over `ranks` ranks, all requests together.

    `seen`: of all pairs of a new token and a cached one, the share that belong to one request;
    `own_seen`: the same of two new tokens. `busiest`: rows of the rank that has most of them; None:
    they are spread evenly.
    """

    ranks: int
    new: int
    cached: int
    seen: float = 1.0
    own_seen: float = 1.0
    busiest: float | None = None

    @property
    def rows(self) -> float:
        """Of the busiest rank."""
        return self.new / self.ranks if self.busiest is None else self.busiest

    @property
    def fewest(self) -> float:
        """Rows of the other ranks, one by one."""
        return (self.new - self.rows) / (self.ranks - 1)

    @property
    def remote_rows(self) -> float:
        """Of the new tokens, those that other ranks own."""
        return self.new - self.rows

    @property
    def remote_cached(self) -> float:
        return self.cached * (self.ranks - 1) / self.ranks

    def touched(self, rows: float) -> float:
        """The share of the cached tokens that so many rows see: those of their requests."""
        return min(1.0, rows * self.seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteChoice:
    """A way for the cached part, one for the chunk's own, and what a layer is expected to take."""

    cached: Remote
    own: Remote
    layer_s: float

    @property
    def ways(self) -> RemoteWays:
        """As a step plan has them."""
        return RemoteWays(cached=self.cached, own=self.own)


def choose_remote(
    step: StepShape, layer: LayerShape, rates: LinkRates, allowed: Iterable[Remote] = Remote
) -> RemoteChoice:
    """The first of `priced_ways`."""
    return priced_ways(step, layer, rates, allowed)[0]


def priced_ways(
    step: StepShape, layer: LayerShape, rates: LinkRates, allowed: Iterable[Remote] = Remote
) -> tuple[RemoteChoice, ...]:
    """All pairs of ways, the fastest first; of equals the simpler, then in the order of `Remote`.

    `allowed`: what this machine can do. DIRECT needs `read_bytes_s`. Raises ValueError if nothing
    is left.
    """
    ways = [w for w in allowed if w is not Remote.DIRECT or rates.read_bytes_s > 0]
    if not ways:
        raise ValueError("no way of reading remote pages is possible here")
    # What is not there needs no way of its own.
    cached_ways = ways if step.cached else ways[:1]
    pairs = itertools.product(cached_ways, ways)
    choices = [
        RemoteChoice(cached=a, own=b, layer_s=layer_seconds(step, layer, rates, a, b))
        for a, b in pairs
    ]
    return tuple(sorted(choices, key=lambda each: (each.layer_s, each.cached is not each.own)))


def layer_seconds(
    step: StepShape, layer: LayerShape, rates: LinkRates, cached: Remote, own: Remote
) -> float:
    """What one layer takes in the middle of a step, where transfers of layers overlap."""
    work = _Attention(step, layer, rates, {True: cached, False: own})
    linear = step.rows * rates.linear_row_s
    late = early = there = back = 0.0  # attention over what came; the line before, after `linear`
    if cached is Remote.GATHER_KV:
        early = rates.message(step.touched(step.rows) * step.remote_cached * layer.kv_bytes)
    if own is Remote.GATHER_KV:
        there = rates.message(step.remote_rows * layer.kv_bytes)
        late = work.remote(False, rates.memory_bytes_s)
    asks = work.asks()
    if asks:  # one message: the same queries ask for both parts
        asked = step.rows * (step.ranks - 1)
        there += rates.message(asked * layer.q_bytes)
        back = rates.message(asked * layer.partial_bytes)
    arrived = max(linear, early) + there  # what travels for the next layer is on the line before
    end = linear + work.present(step.rows)
    if there:
        end = max(end, arrived)
    if asks:
        # Who has the fewest rows has most to do for others, and the busiest one waits for it.
        least = step.fewest
        least_end = linear - (step.rows - least) * rates.linear_row_s + work.present(least)
        end += work.for_others(step.rows)
        end = max(end, max(least_end, arrived) + work.for_others(least))
    return max(end + max(back, late), early + there + back)


@dataclass(frozen=True, slots=True)
class _Attention:
    """Seconds of a rank's attention in a layer, by whose keys it reads: what its products take, or
    what reading the keys takes, if that is longer. Parts: cached (True), the chunk's own (False).
    """

    step: StepShape
    layer: LayerShape
    rates: LinkRates
    ways: dict[bool, Remote]

    def present(self, rows: float) -> float:
        """Of a rank with so many rows, over what is here before its layer is attended to."""
        step, memory = self.step, self.rates.memory_bytes_s
        total = self._over(True, step.cached / step.ranks, rows, memory)
        total += self._over(False, step.rows, rows, memory)
        for is_cached, way in self.ways.items():
            if way is Remote.DIRECT:
                total += self.remote(is_cached, self.rates.read_bytes_s, rows)
            elif way is Remote.GATHER_KV and is_cached:
                total += self.remote(is_cached, memory, rows)
        return total

    def remote(self, is_cached: bool, bytes_s: float, rows: float | None = None) -> float:
        """A rank's queries over the others' keys, read at `bytes_s`."""
        keys = self.step.remote_cached if is_cached else self.step.remote_rows
        return self._over(is_cached, keys, self.step.rows if rows is None else rows, bytes_s)

    def asks(self) -> bool:
        """Whether queries travel: not where there is nothing that they could see."""
        step = self.step
        sees = {True: step.remote_cached, False: step.remote_rows}
        return any(way is Remote.SEND_Q and sees[part] > 0 for part, way in self.ways.items())

    def for_others(self, rows: float) -> float:
        """Of a rank with so many rows: all other queries over its keys."""
        step, total = self.step, 0.0
        for is_cached, way in self.ways.items():
            if way is Remote.SEND_Q:
                keys = step.cached / step.ranks if is_cached else step.fewest
                total += self._over(is_cached, keys, step.new - rows, self.rates.memory_bytes_s)
        return total

    def _over(self, is_cached: bool, keys: float, queries: float, bytes_s: float) -> float:
        """So many queries over so many keys, of which each sees its request's, and none later."""
        step = self.step
        if is_cached:
            share, pairs = step.seen, keys * step.seen
        else:  # causal, by stripes
            share, pairs = step.own_seen, keys * (step.own_seen + step.ranks / step.new) / 2
        seconds = queries * pairs * self.rates.pair_s
        if math.isinf(bytes_s):
            return seconds
        times = math.ceil(queries * share / self.layer.tile) * min(1.0, queries * share)
        return max(seconds, times * keys * self.layer.kv_bytes / bytes_s)
