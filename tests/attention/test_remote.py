"""What travels between ranks, in bytes, and when; ranks are threads with pages of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from phloem.attention import GatherAttention, LayeredAttention, RaggedBatch, RowSpan
from phloem.attention.choice import AttentionChoice
from phloem.attention.remote import RemoteAttention
from phloem.attention.remote_pages import RankPool
from phloem.core.group import OpKind
from phloem.core.remote import IN_PLACE, Remote, RemoteWays
from phloem.groups.local import local_groups
from phloem.kernels import KVBuffer, Scoring, TorchOps
from phloem.kernels.codec import make_codec
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from tests.long import checkered

PAGE = 16
P = 600  # pages of a rank
HEADS, KV_HEADS, DIM = 9, 3, 64
PAGE_BYTES = 2 * KV_HEADS * PAGE * DIM * 4  # of one layer


@dataclass
class World:
    """`n` ranks over one tensor of all pages, each of which touches its own part of it."""

    n: int
    layers: int = 1
    window: int | None = None
    dtype: KVDtype = KVDtype.FP32
    pages: int = P  # of a rank

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        spec = KVSpec(
            kind=AttentionKind.GQA,
            dtype=self.dtype,
            num_layers=self.layers,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            page_size=PAGE,
        )
        codec = make_codec(spec, torch.float32)
        rows = torch.randn(self.n * self.pages + 1, KV_HEADS, self.layers, 2, PAGE, 1, DIM)
        self.buffer = KVBuffer(rows if codec is None else codec.encode(rows), codec)
        self.groups = local_groups(self.n, timeout_s=60)
        direct = GatherAttention(self.buffer, TorchOps(), window=self.window)
        self.direct = LayeredAttention([direct], [range(self.layers)])
        # Alone with its pages: a slot beyond them would be another tensor's.
        self.pools = [
            RankPool(KVBuffer(self._part(r), codec), r, self.pages) for r in range(self.n)
        ]

    def _part(self, rank: int) -> torch.Tensor:
        first = rank * self.pages
        return self.buffer.data[first : first + self.pages + 1].clone()

    def layered(self, rank: int) -> LayeredAttention:
        backend = GatherAttention(self.pools[rank].buffer, TorchOps(), window=self.window)
        return LayeredAttention([backend], [range(self.layers)])

    def shares(self, *rows: tuple[int, int]) -> list[tuple[RaggedBatch]]:
        """Rows of (start, count) new tokens, striped from rank 0 on."""
        spans: list[list[RowSpan]] = [[] for _ in range(self.n)]
        firsts = [0] * self.n
        used = 0
        for start, count in rows:
            number = np.arange(-(-(start + count) // PAGE))
            table = number % self.n * self.pages + number // self.n + used
            used += len(number) // self.n + 1
            positions = np.arange(start, start + count)
            for rank in range(self.n):
                at = positions[positions // PAGE % self.n == rank]
                if len(at):
                    pages = table[: int(at[-1]) // PAGE + 1]
                    span = RowSpan(firsts[rank], int(at[0]), len(at), pages, at=at)
                    spans[rank].append(span)
                    firsts[rank] += len(at)
        return [(RaggedBatch(tuple(s), PAGE),) for s in spans]

    def threads(self, work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.n) as pool:
            return list(pool.map(work, range(self.n)))

    def attend(
        self, ways: RemoteWays | Remote, shares: list[tuple[RaggedBatch]]
    ) -> list[torch.Tensor]:
        """Every rank's result of random queries over pages that are all there already."""
        pair = RemoteWays.all(ways) if isinstance(ways, Remote) else ways

        def run(rank: int) -> torch.Tensor:
            pool, layered = self.pools[rank], self.layered(rank)
            if pair.takes(Remote.DIRECT):
                pool, layered = (
                    RankPool(self.buffer, rank, self.pages, rank * self.pages, mapped=True),
                    self.direct,
                )
            attention = RemoteAttention(layered, [pool], self.groups[rank])
            meta = attention.plan(pair, shares)
            return torch.stack(
                [
                    attention.attend(layer, queries(rank, shares), meta)
                    for layer in range(self.layers)
                ]
            )

        return self.threads(run)

    def wanted(self, shares: list[tuple[RaggedBatch]]) -> list[torch.Tensor]:
        """The same, read in place."""
        return [
            torch.stack(
                [
                    self.direct.attend(layer, queries(rank, shares), self.direct.plan(share))
                    for layer in range(self.layers)
                ]
            )
            for rank, share in enumerate(shares)
        ]

    def bytes_sent(self) -> int:
        return sum(group.traffic()[OpKind.ALL_TO_ALL].bytes_sent for group in self.groups)


def queries(rank: int, shares: list[tuple[RaggedBatch]]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn((shares[rank][0].num_tokens, HEADS, DIM), generator=generator)


ROWS = {
    "64 new tokens on 8K": [(8192, 64)],
    "a cold chunk": [(0, 500)],
    "ragged": [(100, 1), (0, 40), (331, 77), (15, 1), (16, 1)],
    "one token": [(160, 1)],
}


@pytest.mark.parametrize(
    ("rows", "n", "remote"),
    checkered(list(ROWS), [2, 4], [Remote.GATHER_KV, Remote.SEND_Q]),
    ids=str,
)
def test_both_ways_equal_direct(rows, n, remote):
    world = World(n, layers=3)
    shares = world.shares(*ROWS[rows])
    pairs = zip(world.attend(remote, shares), world.wanted(shares), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


MIXED = [RemoteWays(cached=a, own=b) for a in Remote for b in Remote if a is not b]


@pytest.mark.parametrize("ways", MIXED, ids=str)
@pytest.mark.parametrize(("rows", "n"), [("ragged", 4), ("64 new tokens on 8K", 2)])
def test_every_pair_of_ways_equals_direct(rows, n, ways):
    """With the same pages, of which each part goes its own way: none twice, and none left out."""
    world = World(n, layers=2)
    shares = world.shares(*ROWS[rows])
    for got, want in zip(world.attend(ways, shares), world.wanted(shares), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


QUERY_BYTES = HEADS * (DIM + DIM + 1) * 4  # to an owner and back


@pytest.mark.parametrize(
    ("cached", "own", "pages", "queries"),
    [
        (Remote.GATHER_KV, Remote.GATHER_KV, 5 + 5 + 1 + 2, 0),
        (Remote.SEND_Q, Remote.SEND_Q, 0, 64),
        (Remote.SEND_Q, Remote.GATHER_KV, 1 + 2, 64),
        # The chunk's first page sees nothing of the other rank's part of it.
        (Remote.GATHER_KV, Remote.SEND_Q, 5 + 5, 48),
        (Remote.DIRECT, Remote.GATHER_KV, 1 + 2, 0),
        (Remote.DIRECT, Remote.SEND_Q, 0, 48),
        (Remote.GATHER_KV, Remote.DIRECT, 5 + 5, 0),
        (Remote.SEND_Q, Remote.DIRECT, 0, 64),
    ],
)
def test_each_part_moves_its_own_bytes_and_no_more(cached, own, pages, queries):
    """64 new tokens on 160 cached ones, two ranks: 5 pages of each rank are cached, 2 are new, and
    rank 1 has the last one. The same queries ask for both parts, so where those of the cached part
    travel anyway, the chunk's own part costs nothing more that way, and its pages would."""
    world = World(2, layers=3)
    world.attend(RemoteWays(cached=cached, own=own), world.shares((160, 64)))
    assert world.bytes_sent() == 3 * (pages * PAGE_BYTES + queries * QUERY_BYTES)


def test_a_page_that_is_half_full_goes_the_way_of_the_chunk():
    """Tokens that were cached in it are sent with those that the step writes, after its write."""
    world = World(2)
    world.attend(RemoteWays(cached=Remote.SEND_Q, own=Remote.GATHER_KV), world.shares((24, 16)))
    # Rank 1 has positions 16 ... 31, of which 8 are new; rank 0's are 32 ... 39, all of which see
    # that page; rank 1's queries ask for page 0, and nothing of page 2 is seen by them.
    assert world.bytes_sent() == PAGE_BYTES + 8 * QUERY_BYTES


def test_pages_that_are_not_mapped_are_not_read_in_place():
    world = World(2)
    attention = RemoteAttention(world.layered(0), world.pools[:1], world.groups[0])
    with pytest.raises(ValueError, match="not mapped"):
        attention.plan(RemoteWays(own=Remote.GATHER_KV), world.shares((160, 32)))


@pytest.mark.parametrize("dtype", [d for d in KVDtype if d.is_packed], ids=lambda d: d.value)
def test_packed_pages_travel_as_they_are_stored(dtype):
    """And are attended to alike in all ways, between the gaps of other ranks' pages as well."""
    sent = {}
    for remote in (Remote.GATHER_KV, Remote.SEND_Q):
        world = World(2, dtype=dtype, pages=30)  # packing is slow
        shares = world.shares(*ROWS["ragged"])
        pairs = zip(world.attend(remote, shares), world.wanted(shares), strict=True)
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        sent[remote] = world.bytes_sent()
    unpacked = World(2)
    unpacked.attend(Remote.GATHER_KV, unpacked.shares(*ROWS["ragged"]))
    stored = world.buffer.data[0].nbytes
    assert sent[Remote.GATHER_KV] * PAGE_BYTES == unpacked.bytes_sent() * stored


@pytest.mark.parametrize("n", [2, 4])
def test_gather_sends_each_remote_page_once_per_layer(n):
    """To each rank that needs it, whatever rows and tokens of it read the page."""
    world = World(n, layers=3)
    shares = world.shares(*ROWS["ragged"])
    pages = 0
    for rank, (batch,) in enumerate(shares):
        read = {int(p) for s in batch.spans for p in s.slots if p // P != rank}
        pages += len(read)
    world.attend(Remote.GATHER_KV, shares)
    assert pages > 0
    assert world.bytes_sent() == 3 * pages * PAGE_BYTES


def test_rows_that_share_a_prefix_send_it_once():
    world = World(2)
    shares = world.shares((320, 40))
    (batch,) = shares[0]
    (span,) = batch.spans
    twice = RowSpan(span.count, span.start, span.count, span.slots, at=span.at)
    world.attend(Remote.GATHER_KV, shares)
    once = world.bytes_sent()
    both = World(2)
    both.attend(Remote.GATHER_KV, [(RaggedBatch((span, twice), PAGE),), shares[1]])
    assert both.bytes_sent() == once


def test_send_q_saves_25_times_the_bytes_for_64_tokens_on_8k():
    """Counted exactly: a query out, and a result with its log-sum-exp back, for each owner."""
    sent = {}
    for remote in (Remote.GATHER_KV, Remote.SEND_Q):
        world = World(2)
        world.attend(remote, world.shares((8192, 64)))
        sent[remote] = world.bytes_sent()
    # Of the chunk's four pages one lies after all of rank 0's tokens.
    assert sent[Remote.GATHER_KV] == (256 + 1 + 256 + 2) * PAGE_BYTES
    assert sent[Remote.SEND_Q] == 64 * HEADS * (DIM + DIM + 1) * 4
    assert sent[Remote.GATHER_KV] >= 25 * sent[Remote.SEND_Q]


def test_a_query_that_sees_nothing_of_a_rank_is_not_sent_there():
    world = World(4)
    shares = world.shares((0, 3 * PAGE))
    world.attend(Remote.SEND_Q, shares)
    # The second page's tokens ask one rank, those of the third page two; the fourth has nothing.
    assert world.bytes_sent() == 3 * PAGE * HEADS * (2 * DIM + 1) * 4


@pytest.mark.parametrize("window", [1, 20, 100])
@pytest.mark.parametrize("remote", [Remote.GATHER_KV, Remote.SEND_Q])
def test_of_a_window_only_its_pages_travel(window, remote):
    world = World(2, window=window)
    shares = world.shares((4000, 50), (0, 60), (777, 1))
    pairs = zip(world.attend(remote, shares), world.wanted(shares), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    tokens = (window - 1 + 50) + 60 + (window - 1 + 1)
    assert world.bytes_sent() <= (tokens // PAGE + 3) * PAGE_BYTES


class Diary:
    """Notes when a rank begins an exchange and when it attends."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def group(self, group: Any) -> Any:
        diary = self

        class Noted:
            def begin_all_to_all(self, out: Any, parts: Any) -> Any:
                diary.lines.append(f"send {sum(len(p) for p in parts)}")
                return group.begin_all_to_all(out, parts)

        return Noted()

    def backend(self, backend: GatherAttention) -> GatherAttention:
        diary, partial = self, backend.partial

        def noted(layer: int, q: torch.Tensor, meta: Any) -> Any:
            diary.lines.append(f"attend {layer}")
            return partial(layer, q, meta)

        backend.partial = noted  # type: ignore[method-assign]
        return backend


@pytest.mark.parametrize("ahead", [True, False])
def test_cached_pages_travel_while_the_layer_before_computes(ahead):
    """All that was cached is on its way before the layer before attends; what the step writes is
    sent at its own layer. Not ahead: nothing leaves before its own layer."""
    world = World(2, layers=3)
    shares = world.shares((160, 32))
    diaries = [Diary() for _ in range(2)]

    def run(rank: int) -> None:
        backend = GatherAttention(world.pools[rank].buffer, TorchOps())
        layered = LayeredAttention([diaries[rank].backend(backend)], [range(3)])
        group = diaries[rank].group(world.groups[rank])
        attention = RemoteAttention(layered, world.pools[rank : rank + 1], group)
        meta = attention.plan(RemoteWays.all(Remote.GATHER_KV), shares, ahead=ahead)
        for layer in range(3):
            attention.attend(layer, queries(rank, shares), meta)

    world.threads(run)
    cached, written = "send 5", "send 1"  # rank 0 sends its page of the chunk to rank 1
    if ahead:
        want = [cached, written, cached, "attend 0", written, cached, "attend 1"]
        want += [written, "attend 2"]
    else:
        want = [x for layer in range(3) for x in (cached, written, f"attend {layer}")]
    assert diaries[0].lines == want


def test_the_way_may_change_from_step_to_step():
    """Over the same pages, which all ranks map here: each way writes what the next one reads."""
    world = World(2, layers=2)
    ways = [RemoteWays.all(way) for way in (Remote.SEND_Q, Remote.GATHER_KV)]
    ways = [IN_PLACE, *ways, RemoteWays(cached=Remote.SEND_Q), IN_PLACE]
    choices = [
        AttentionChoice(
            world.direct,
            [RankPool(world.buffer, rank, P, rank * P, mapped=True)],
            world.groups[rank],
        )
        for rank in range(2)
    ]
    one = World(1, layers=2)
    one_choice = AttentionChoice(one.direct, [RankPool(one.buffer, 0, P)])
    for step, way in enumerate(ways):
        start, count = 50 * step, 50
        shares, alone = world.shares((start, count)), one.shares((start, count))
        whole = torch.randn(2, 3, count, HEADS, DIM)
        want = []
        planned = one_choice.plan(IN_PLACE, alone)
        for layer, (q, k, v) in enumerate(whole):
            k, v = k[:, :KV_HEADS], v[:, :KV_HEADS]
            want.append(planned.attention.run(layer, q, k, v, planned.meta))

        def run(rank: int, way=way, shares=shares, whole=whole, start=start) -> Any:
            at = torch.from_numpy(shares[rank][0].positions()) - start
            plan = choices[rank].plan(way, shares)
            in_place = way.own is Remote.DIRECT
            meet = (lambda _: world.groups[rank].barrier()) if in_place else None
            outs = []
            for layer, (q, k, v) in enumerate(whole[:, :, at]):
                new = q, k[:, :KV_HEADS], v[:, :KV_HEADS]
                outs.append(plan.attention.run(layer, *new, plan.meta, on_written=meet))
            return torch.stack(outs), at

        for got, at in world.threads(run):
            torch.testing.assert_close(got, torch.stack(want)[:, at], rtol=0, atol=1e-5)
        for group in world.groups:
            assert group.traffic()[OpKind.BARRIER].calls == (2, 2, 2, 4, 6)[step]


def test_other_weights_count_in_every_way():
    """Attention itself may hold some: what makes K and V of latents. Here, another scale."""
    world = World(2, layers=2)
    shares = world.shares((100, 40))
    other = GatherAttention(world.buffer, TorchOps(), scoring=Scoring(0.5))
    world.direct, before = LayeredAttention([other], [range(2)]), world.direct
    want = world.wanted(shares)

    def run(rank: int) -> list[torch.Tensor]:
        pool = RankPool(world.buffer, rank, P, rank * P, mapped=True)
        choice = AttentionChoice(before, [pool], world.groups[rank])
        choice.replace(world.direct)
        outs = []
        for way in Remote:
            plan = choice.plan(RemoteWays.all(way), shares)
            q = queries(rank, shares)
            outs.append(torch.stack([plan.attention.attend(i, q, plan.meta) for i in range(2)]))
        return outs

    for got, expected in zip(world.threads(run), want, strict=True):
        for out in got:
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_direct_is_no_exchange():
    world = World(2)
    attention = RemoteAttention(world.layered(0), world.pools[:1], world.groups[0])
    with pytest.raises(ValueError, match="read in place"):
        attention.plan(IN_PLACE, world.shares((160, 32)))
