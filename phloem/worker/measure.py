"""What a rank's machine and its link to the others can do, measured before the first step.

All ranks measure at the same time, as they will compute; each figure is that of the slowest. It
takes some tenths of a second, and writes into pages of this rank that nobody has been given yet.

    link      messages of two sizes, from all ranks to all
    memory    a sample of this rank's pages, and of another one's where they are mapped
    layer     a layer of the model over few tokens, without a context and with one; and over one
              token, whose query travels
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from phloem.attention import RaggedBatch, RowSpan
from phloem.attention.choice import AttentionChoice, PlannedAttention
from phloem.attention.remote_pages import RankPool
from phloem.core.group import Group, Reduce
from phloem.core.remote import LinkRates, Remote, RemoteWays
from phloem.models import Forward

__all__ = ["measure_rates"]

SMALL_BYTES, LARGE_BYTES = 64, 1 << 19
SMALL_TURNS, LARGE_TURNS = 15, 3
SAMPLE_BYTES = 16 << 20
READ_TURNS = 6  # the fastest counts: others may run on this core meanwhile
TOKENS, CONTEXT = 8, 2048
TURNS = 4  # the first one is not counted
_LEAST_S = 1e-12


@torch.inference_mode()
def measure_rates(model: Forward, choice: AttentionChoice) -> LinkRates:
    """Every rank calls it, while no plan is in flight. Raises GroupError if one does not.

    A model all of whose layers have a window is measured by these.
    """
    group, pools = choice.group, choice.pools
    assert group is not None, "ranks that measure anything are in a group"
    component = next(c for c, numbers in enumerate(choice.direct.layers) if numbers)
    small_s, large_s = _message_times(group, pools[component].buffer.data.device)
    own, other = _read_rates(pools[component], group)
    layer = _Layer(model, choice, component)
    times = [small_s, large_s, *layer.row_and_pair(), layer.added_by_queries() / 2]
    worst = torch.tensor([*(-each for each in times), own, other], dtype=torch.float64)
    group.all_reduce(worst, Reduce.MIN)
    small_s, large_s, row_s, pair_s, around_s = (-worst[:5]).tolist()
    received = LARGE_BYTES * (group.size - 1)
    return LinkRates(
        latency_s=max(small_s, around_s),
        # On a busy machine a small message may have waited longer than a large one.
        bytes_s=received / max(large_s - small_s, large_s / 2, _LEAST_S),
        linear_row_s=max(row_s, _LEAST_S),
        pair_s=max(pair_s, _LEAST_S),
        read_bytes_s=float(worst[6]),
        memory_bytes_s=float(worst[5]),
    )


def _message_times(group: Group[Tensor], device: torch.device) -> tuple[float, float]:
    """Seconds of a small exchange of all with all, and of a large one, of memory of `device`."""
    small = [_exchange(group, SMALL_BYTES, device) for _ in range(SMALL_TURNS + 1)]
    large = [_exchange(group, LARGE_BYTES, device) for _ in range(LARGE_TURNS + 1)]
    return statistics.median(small[1:]), statistics.median(large[1:])


def _exchange(group: Group[Tensor], num_bytes: int, device: torch.device) -> float:
    """Seconds of one exchange that all ranks begin together."""
    parts = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(group.size)]
    out = [torch.empty_like(part) for part in parts]
    _now(device)
    group.barrier()
    started = time.perf_counter()
    group.all_to_all(out, parts)
    return _now(device) - started


def _now(device: torch.device) -> float:
    """The time once `device` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _read_rates(pool: RankPool, group: Group[Tensor]) -> tuple[float, float]:
    """Bytes a second of this rank's pages, and of the next rank's; 0 where these are not mapped."""
    data = pool.buffer.data
    pages = max(1, min(pool.pages_per_rank, SAMPLE_BYTES // max(1, data[0].nbytes)))

    def sample(rank: int) -> Tensor:
        first = int(pool.slots(np.array([rank * pool.pages_per_rank]))[0])
        return data[first : first + pages]

    own = sample(pool.rank)
    own.zero_()  # memory belongs to who writes it first
    scratch = torch.empty_like(own)
    group.barrier()
    rate = _copy_rate(scratch, own)
    if not pool.mapped:
        return rate, 0.0
    return rate, _copy_rate(scratch, sample((pool.rank + 1) % group.size))


def _copy_rate(to: Tensor, pages: Tensor) -> float:
    seconds = []
    for _ in range(READ_TURNS):
        started = _now(pages.device)
        to.copy_(pages)
        seconds.append(_now(pages.device) - started)
    return pages.nbytes / max(min(seconds), _LEAST_S)


class _Enough(Exception):
    """The layers that are looked at have been computed."""


@dataclass(slots=True)
class _Stopwatch:
    """Times one of the layers of a pass, and ends it."""

    layer: int
    device: torch.device
    done: int = 0
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0

    def __call__(self) -> None:
        now = _now(self.device)
        if self.done == self.layer:
            self.seconds = now - self.started
            raise _Enough
        self.done, self.started = self.done + 1, now


class _Layer:
    """One layer of the model, over pages that nobody has been given, whatever they hold."""

    def __init__(self, model: Forward, choice: AttentionChoice, component: int) -> None:
        self._model, self._choice = model, choice
        numbers = choice.direct.layers[component]
        # Not the model's first one, if that can be: the embedding would be timed with it.
        self._number = numbers[0] or numbers[min(1, len(numbers) - 1)]
        self.tokens = min(TOKENS, model.num_positions)
        self.context = min(CONTEXT, model.num_positions - self.tokens)

    def row_and_pair(self) -> tuple[float, float]:
        """Seconds of the products for one token, and of its attention over one key."""
        alone_s = self.seconds(0, self.tokens)
        if not self.context:
            return alone_s / self.tokens, 0.0
        seen_s = max(0.0, self.seconds(self.context, self.tokens) - alone_s)
        return alone_s / self.tokens, seen_s / (self.tokens * self.context)

    def seconds(self, start: int, count: int) -> float:
        """Of `count` tokens after `start` others, over this rank's pages alone."""
        batches = [self._own_row(pool, start, count) for pool in self._choice.pools]
        planned = PlannedAttention(self._choice.direct, self._choice.direct.plan(batches))
        # As often on every rank: there may be others that compute the same layer with this one.
        return min([self._time(planned, start, count) for _ in range(TURNS)][1:])

    def added_by_queries(self) -> float:
        """Seconds by which a layer of one token takes longer where its query travels to all others
        and back: two messages, and what has to be done around them. Ranks do it together."""
        group, pools = self._choice.group, self._choice.pools
        assert group is not None, "see `measure_rates`"
        start = group.size * pools[0].buffer.page_size
        if start >= self._model.num_positions:
            return 0.0
        shares = [[self._shared_row(p, r, group.size) for p in pools] for r in range(group.size)]
        ways = RemoteWays.all(Remote.SEND_Q)
        seconds = []
        for _ in range(TURNS):
            # Not ahead: the pass ends in the middle, where nothing may be under way.
            planned = self._choice.plan(ways, shares, ahead=False)
            group.barrier()
            seconds.append(self._time(planned, start, 1))
        return max(0.0, statistics.median(seconds[1:]) - self.seconds(start, 1))

    def _time(self, planned: PlannedAttention, start: int, count: int) -> float:
        device = self._model.device
        watch = _Stopwatch(self._number, device)
        with contextlib.suppress(_Enough):
            self._model.forward(
                torch.zeros(count, dtype=torch.int64, device=device),
                torch.arange(start, start + count, device=device),
                attention=planned.attention,
                meta=planned.meta,
                on_layer=watch,
            )
        return watch.seconds

    def _own_row(self, pool: RankPool, start: int, count: int) -> RaggedBatch:
        """All pages are this rank's, over and over, where they lie."""
        size = pool.buffer.page_size
        number = np.arange(-(-(start + count) // size)) % pool.pages_per_rank
        slots = pool.slots(pool.rank * pool.pages_per_rank + number)
        return RaggedBatch((RowSpan(0, start, count, slots),), size)

    def _shared_row(self, pool: RankPool, rank: int, size: int) -> RaggedBatch:
        """The token of `rank` after a page of each; global numbers."""
        owners = np.array([*range(size), rank])
        number = np.array([*range(size), size]) % pool.pages_per_rank
        slots = owners * pool.pages_per_rank + number
        page_size = pool.buffer.page_size
        return RaggedBatch((RowSpan(0, size * page_size, 1, slots),), page_size)
