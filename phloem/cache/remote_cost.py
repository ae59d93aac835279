"""Which way of reading remote pages is the fastest, for a step of a given shape.

A step of N ranks computes `new` tokens over `cached` ones; both are spread evenly, so each rank
has n = new / N rows, owns c = cached / N of the cached tokens, and does the same work. In a layer:

    rows   |---- linear ----|---- attention over what is here ----|-- over what came --|
    link   |-- cached pages of the next layer --|   |-- the chunk's own K and V --|    |-- ...

- DIRECT moves nothing; a tile of queries reads remote keys at `read_bytes_s`.
- GATHER_KV of the cached part is known before the step: layer l + 1 travels while layer l computes,
  so it costs what does not fit behind the computing. The chunk's own K and V exist only after the
  linear part of their layer, and hide behind the attention over everything else.
- SEND_Q moves queries one way and partial results the other, after the linear part; the attention
  itself is as much as before, only elsewhere.

Bytes that leave a rank and bytes that reach it share nothing; each direction is one line of
`latency_s` a message and `bytes_s`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from phloem.core.remote import Remote

__all__ = ["LayerShape", "LinkRates", "RemoteChoice", "StepShape", "choose_remote", "layer_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """What was measured at the start: between two ranks, and of one rank's arithmetic.

    `read_bytes_s`: of remote memory read in place; 0 where it is not mapped.
    `linear_row_s`: a layer's products for one row; `pair_s`: attention of one query over one key.
    """

    latency_s: float
    bytes_s: float
    linear_row_s: float
    pair_s: float
    read_bytes_s: float = 0.0

    def message(self, num_bytes: float) -> float:
        """Seconds of one message; nothing is sent where there are no bytes."""
        return self.latency_s + num_bytes / self.bytes_s if num_bytes else 0.0


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
    """One step over `ranks` ranks, all requests together."""

    ranks: int
    new: int
    cached: int

    @property
    def rows(self) -> float:
        return self.new / self.ranks

    @property
    def remote_rows(self) -> float:
        """Of the new tokens, those that other ranks own."""
        return self.new - self.rows

    @property
    def remote_cached(self) -> float:
        return self.cached * (self.ranks - 1) / self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteChoice:
    """A way for the cached part, one for the chunk's own, and what a layer is expected to take."""

    cached: Remote
    own: Remote
    layer_s: float


def choose_remote(
    step: StepShape, layer: LayerShape, rates: LinkRates, allowed: Iterable[Remote] = Remote
) -> RemoteChoice:
    """The fastest pair of ways; the first of equals in the order of `Remote`.

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
    return min(choices, key=lambda choice: choice.layer_s)


def layer_seconds(
    step: StepShape, layer: LayerShape, rates: LinkRates, cached: Remote, own: Remote
) -> float:
    """What one layer takes in the middle of a step, where transfers of layers overlap."""
    pairs = _Pairs.of(step, rates)
    linear = step.rows * rates.linear_row_s
    present, late, queries = pairs.here, 0.0, 0.0  # seconds of attention, by when it can begin
    early = there = back = 0.0  # seconds on the line: before the layer, after `linear`, at the end
    for way, tokens, seconds, is_cached in (
        (cached, step.remote_cached, pairs.remote_cached, True),
        (own, step.remote_rows, pairs.remote_own, False),
    ):
        if not tokens:
            continue
        if way is Remote.DIRECT:
            reads = math.ceil(step.rows / layer.tile) * tokens * layer.kv_bytes
            present += max(seconds, reads / rates.read_bytes_s)
        elif way is Remote.GATHER_KV and is_cached:
            early += rates.message(tokens * layer.kv_bytes)
            present += seconds
        elif way is Remote.GATHER_KV:
            there += rates.message(tokens * layer.kv_bytes)
            late += seconds
        else:
            queries += seconds  # the owner's work on them: as much as it has sent away
    if queries:  # one message: the same queries ask for both parts
        asked = step.rows * (step.ranks - 1)
        there += rates.message(asked * layer.q_bytes)
        back += rates.message(asked * layer.partial_bytes)
    arrived = max(linear, early) + there  # what travels for the next layer is on the line before
    end = linear + present
    if there:
        end = max(end, arrived) + queries
        end = max(end + back, end + late)
    return max(end, early + there + back)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """Seconds of one rank's attention in a layer, by whose keys it reads."""

    here: float
    remote_cached: float
    remote_own: float

    @classmethod
    def of(cls, step: StepShape, rates: LinkRates) -> _Pairs:
        cached = step.rows * step.cached * rates.pair_s
        own = step.rows * (step.new + step.ranks) / 2 * rates.pair_s  # causal, by stripes
        here = 1 / step.ranks
        return cls(
            here=(cached + own) * here,
            remote_cached=cached * (1 - here),
            remote_own=own * (1 - here),
        )
