"""One rank of a step over a simulated link, event by event: what `cache/remote_cost.py` predicts.

All ranks are alike (no `StepShape.busiest`), so one stands for all: its line carries what it
receives, first come first served, and its processor does one thing at a time. Cached pages travel
ahead as far as two staging buffers allow: those of layer l + 1 from the moment layer l - 1 has been
attended.

    line       [cached l+1]      [queries | own K, V l]      [partial results l]
    processor  linear l | attention: present .. queries of others .. what came late | linear l+1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from phloem.cache.remote_cost import LayerShape, LinkRates, StepShape, choose_remote
from phloem.core.remote import Remote

__all__ = ["Cell", "remote_grid", "right_share", "simulate_step"]

Cell: TypeAlias = tuple[StepShape, LayerShape, LinkRates]


@dataclass(slots=True)
class _Line:
    """A line that is busy until `free_s`."""

    rates: LinkRates
    free_s: float = 0.0

    def send(self, ready_s: float, num_bytes: float) -> float:
        """When bytes that can leave at `ready_s` have arrived."""
        if not num_bytes:
            return ready_s
        start = max(ready_s, self.free_s)
        self.free_s = start + self.rates.message(num_bytes)
        return self.free_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Of one layer: bytes by when they can leave, and seconds of attention by when it can begin."""

    ahead_bytes: float
    kv_bytes: float
    query_bytes: float
    partial_bytes: float
    present_s: float
    for_others_s: float
    late_s: float


def simulate_step(
    step: StepShape,
    layer: LayerShape,
    rates: LinkRates,
    cached: Remote,
    own: Remote,
    num_layers: int,
) -> float:
    """Seconds of `num_layers` layers, from an idle line to the last result."""
    work = _work(step, layer, rates, cached, own)
    linear_s = step.rows * rates.linear_row_s
    line = _Line(rates)
    ahead = [line.send(0.0, work.ahead_bytes)]  # the first layer's pages: nothing to hide behind
    now = 0.0
    for number in range(num_layers):
        if number + 1 < num_layers:  # the layer before has been attended: its buffer is free
            ahead.append(line.send(now, work.ahead_bytes))
        now = max(now, ahead[number] if work.ahead_bytes else now) + linear_s
        asked = line.send(now, work.query_bytes)
        came = line.send(now, work.kv_bytes)
        now += work.present_s
        answered = now
        if work.query_bytes:
            now = max(now, asked) + work.for_others_s
            answered = line.send(now, work.partial_bytes)
        if work.kv_bytes:
            now = max(now, came) + work.late_s
        now = max(now, answered)
    return now


def _work(
    step: StepShape, layer: LayerShape, rates: LinkRates, cached: Remote, own: Remote
) -> _Work:
    """Counted token by token where the cost model has formulas."""
    ahead = kv = query = partial = present = for_others = late = 0.0
    peers = step.ranks - 1
    rows = step.new / step.ranks
    for way, whose in ((cached, "cached"), (own, "own")):
        keys = step.cached if whose == "cached" else step.new
        remote_keys = keys * peers / step.ranks
        if whose == "cached":
            share, pairs = step.seen, rows * keys * step.seen
        else:  # row i of a rank sits at position i * ranks + rank, of which one rank is the middle
            pairs = sum(i * step.ranks + (step.ranks + 1) / 2 for i in range(math.ceil(rows)))
            share, pairs = step.own_seen, pairs * rows / math.ceil(rows) * step.own_seen

        def reading(tokens: float, bytes_s: float, askers: int = 1, share: float = share) -> float:
            """Seconds of reading so many keys, for the queries of so many ranks."""
            tiles = math.ceil(rows * askers * share / layer.tile) * min(1.0, rows * askers * share)
            return 0.0 if math.isinf(bytes_s) else tiles * tokens * layer.kv_bytes / bytes_s

        memory = rates.memory_bytes_s
        present += max(pairs / step.ranks * rates.pair_s, reading(keys / step.ranks, memory))
        remote_s = pairs * peers / step.ranks * rates.pair_s
        if not remote_keys:
            continue
        if way is Remote.DIRECT:
            present += max(remote_s, reading(remote_keys, rates.read_bytes_s))
        elif way is Remote.GATHER_KV:
            if whose == "cached":
                ahead += remote_keys * layer.kv_bytes * step.touched(rows)
                present += max(remote_s, reading(remote_keys, memory))
            else:
                kv += remote_keys * layer.kv_bytes
                late += max(remote_s, reading(remote_keys, memory))
        else:
            query = rows * peers * layer.q_bytes  # the same queries for both parts
            partial = rows * peers * layer.partial_bytes
            for_others += max(remote_s, reading(keys / step.ranks, memory, peers))
    return _Work(
        ahead_bytes=ahead,
        kv_bytes=kv,
        query_bytes=query,
        partial_bytes=partial,
        present_s=present,
        for_others_s=for_others,
        late_s=late,
    )


def remote_grid() -> Iterator[Cell]:
    """Shapes of small and large models, 2 and 4 ranks, from 1 Gbit/s to mapped memory."""
    layers = (
        LayerShape(kv_bytes=768, q_bytes=1152, partial_bytes=2340),  # 9 heads on 3 of 64
        LayerShape(kv_bytes=4096, q_bytes=8192, partial_bytes=16512),  # 32 on 8 of 128
        LayerShape(kv_bytes=1152, q_bytes=147456, partial_bytes=262656),  # MLA: 128 on a latent
    )
    processors = ((4e-6, 4e-9), (2e-7, 1e-10))  # a CPU core, a small GPU
    links = ((3e-4, 0.125e9, 0.0), (2e-5, 3e9, 0.0), (1e-5, 25e9, 0.0), (2e-6, 10e9, 8e9))
    sizes = itertools.product((2, 4), (16, 256, 4096), (0, 1024, 8192, 65536))
    for (ranks, new, cached), layer, (row, pair), link in itertools.product(
        sizes, layers, processors, links
    ):
        latency, num_bytes, reads = link
        rates = LinkRates(
            latency_s=latency,
            bytes_s=num_bytes,
            linear_row_s=row,
            pair_s=pair,
            read_bytes_s=reads,
        )
        yield StepShape(ranks=ranks, new=new, cached=cached), layer, rates


def right_share(cells: Iterable[Cell], num_layers: int) -> float:
    """The share of cells in which the model's pick is the fastest simulated one, but for 1 %."""
    right = total = 0
    for step, layer, rates in cells:
        ways = [w for w in Remote if w is not Remote.DIRECT or rates.read_bytes_s > 0]
        took = {
            pair: simulate_step(step, layer, rates, *pair, num_layers)
            for pair in itertools.product(ways, ways)
        }
        choice = choose_remote(step, layer, rates)
        right += took[choice.cached, choice.own] <= 1.01 * min(took.values())
        total += 1
    return right / total
