"""Attention over pages: the fast backend against the definition, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phloem.attention import (
    GatherAttention,
    RaggedBatch,
    ReferenceAttention,
    RowSpan,
    gather_plan,
)
from phloem.kernels import Scoring, TorchOps
from phloem.kv.layout import PageLayout
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.pools import DevicePool
from tests.long import few

NUM_PAGES, LAYERS = 400, 2
# Of packed pages both sides read the same numbers, in fp32.
TOLERANCES = {dtype: 3e-6 for dtype in KVDtype} | {KVDtype.BF16: 2e-2}


def make_pool(page_size: int, *, kv_heads: int, groups: int, dtype: KVDtype) -> DevicePool:
    spec = KVSpec(
        kind=AttentionKind.GQA,
        dtype=dtype,
        num_layers=LAYERS,
        num_kv_heads=kv_heads,
        head_dim=16 if dtype is KVDtype.FP4 else 8,
        page_size=page_size,
    )
    pool = DevicePool(PageLayout(spec, NUM_PAGES, groups), device=torch.device("cpu"))
    pool.fill_nan(np.arange(NUM_PAGES))
    return pool


def random_batch(rng: np.random.Generator, page_size: int) -> RaggedBatch:
    """Rows at random positions with 1 to 20 new tokens; their pages lie anywhere in the pool."""
    free = rng.permutation(NUM_PAGES).astype(np.int64).tolist()
    spans, first = [], 0
    for _ in range(rng.integers(1, 7)):
        count = int(rng.choice([1, 1, 1, 2, 7, 20]))
        start = int(rng.integers(0, 40))
        num_pages = -(-(start + count) // page_size)
        slots = np.array([free.pop() for _ in range(num_pages)], dtype=np.int64)
        spans.append(RowSpan(first, start, count, slots))
        first += count
    return RaggedBatch(tuple(spans), page_size)


def fill_earlier(pool: DevicePool, batch: RaggedBatch) -> None:
    """Write random K and V at every position before the spans, and nowhere else."""
    size = batch.page_size
    for span in batch.spans:
        for pos in range(span.start):
            page = pool.buffer.data[span.slots[pos // size]]
            shape = (*page.shape[:3], *page.shape[4:-1], pool.layout.spec.head_dim)
            rows = torch.randn(shape).to(pool.buffer.dtype)
            page[..., pos % size, :, :] = pool.buffer.encode(rows)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("kv_heads", "groups"), [(2, 2), (3, 1), (4, 2)])
@pytest.mark.parametrize("dtype", list(KVDtype), ids=lambda d: d.value)
@pytest.mark.parametrize("seed", few(range(6), 2))
def test_ragged_batches_equal_the_definition(page_size, kv_heads, groups, dtype, seed, monkeypatch):
    """Every slot that holds no token of a row is NaN, and none of it is seen."""
    monkeypatch.setattr(gather_plan, "CONTEXT_BLOCK_TOKENS", 13)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    pool = make_pool(page_size, kv_heads=kv_heads, groups=groups, dtype=dtype)
    batch = random_batch(rng, page_size)
    fill_earlier(pool, batch)
    twin = make_pool(page_size, kv_heads=kv_heads, groups=groups, dtype=dtype)
    twin.buffer.data.copy_(pool.buffer.data)
    kind, dim = pool.buffer.dtype, pool.layout.spec.head_dim
    q = torch.randn(batch.num_tokens, 2 * kv_heads, dim).to(kind)
    k, v = torch.randn(2, batch.num_tokens, kv_heads, dim).to(kind)
    fast, slow = GatherAttention(pool.buffer, TorchOps()), ReferenceAttention(twin.buffer)
    for layer in range(LAYERS):
        got = fast.run(layer, q, k, v, fast.plan(batch)).float()
        want = slow.run(layer, q, k, v, slow.plan(batch)).float()
        assert float((got - want).abs().max()) < TOLERANCES[dtype]
    same = pool.buffer.data.nan_to_num(9.0) == twin.buffer.data.nan_to_num(9.0)
    assert bool(same.all()), "both wrote the same slots, and only those"


def test_a_padded_decode_batch_is_cut_by_memory(monkeypatch):
    """Many rows of one length: batches stay below the bound, and every row is in one of them."""
    pool = make_pool(4, kv_heads=2, groups=2, dtype=KVDtype.FP32)
    token_bytes = 2 * 2 * 8 * 4
    monkeypatch.setattr(gather_plan, "DECODE_BATCH_BYTES", 3 * 8 * token_bytes)
    spans = tuple(RowSpan(i, 7, 1, np.array([2 * i, 2 * i + 1])) for i in range(8))
    plan = GatherAttention(pool.buffer, TorchOps()).plan(RaggedBatch(spans, 4))
    assert [d.rows.tolist() for d in plan.decodes] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert plan.chunks == ()


def test_lengths_apart_are_not_padded_together():
    pool = make_pool(4, kv_heads=2, groups=2, dtype=KVDtype.FP32)
    spans = tuple(
        RowSpan(i, end - 1, 1, np.arange(-(-end // 4))) for i, end in enumerate([400, 3, 390, 9])
    )
    plan = GatherAttention(pool.buffer, TorchOps()).plan(RaggedBatch(spans, 4))
    assert [d.rows.tolist() for d in plan.decodes] == [[1, 3], [2, 0]]


def window_batch(rng: np.random.Generator, page_size: int, window: int) -> RaggedBatch:
    """Rows whose table begins with the window of their first token, some after a restart."""
    free = rng.permutation(NUM_PAGES).astype(np.int64).tolist()
    spans, first = [], 0
    for _ in range(rng.integers(1, 7)):
        count = int(rng.choice([1, 1, 1, 2, 7, 30]))
        start = int(rng.integers(0, 90))
        read_from = int(rng.choice([0, start, rng.integers(0, start + 1)]))
        base = max(read_from, start - window + 1, 0) // page_size
        slots = [free.pop() for _ in range(-(-(start + count) // page_size) - base)]
        spans.append(RowSpan(first, start, count, np.array(slots), base=base, read_from=read_from))
        first += count
    return RaggedBatch(tuple(spans), page_size)


def fill_window(pool: DevicePool, batch: RaggedBatch, window: int) -> None:
    """Write random K and V where the spans may read, and nowhere else: not even in those pages."""
    size = batch.page_size
    for span in batch.spans:
        for pos in range(span.earliest(window), span.start):
            page = pool.buffer.data[span.slots[pos // size - span.base]]
            shape = (*page.shape[:3], *page.shape[4:-1], pool.layout.spec.head_dim)
            rows = torch.randn(shape).to(pool.buffer.dtype)
            page[..., pos % size, :, :] = pool.buffer.encode(rows)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 70])
@pytest.mark.parametrize("form", ["plain", "sinks", "softcap", "all"])
def test_windows_equal_the_definition_and_read_nothing_else(page_size, window, form, monkeypatch):
    """Whatever lies outside of a row's windows is NaN. Bands of 4 queries: many borders."""
    monkeypatch.setattr(gather_plan, "MIN_BAND", 4)
    monkeypatch.setattr(gather_plan, "MAX_BAND", 8)
    torch.manual_seed(window)
    rng = np.random.default_rng([page_size, window, len(form)])
    pools = [make_pool(page_size, kv_heads=2, groups=1, dtype=KVDtype.FP32) for _ in range(2)]
    batch = window_batch(rng, page_size, window)
    fill_window(pools[0], batch, window)
    pools[1].buffer.data.copy_(pools[0].buffer.data)
    q = torch.randn(batch.num_tokens, 6, 8)
    k, v = torch.randn(2, batch.num_tokens, 2, 8)
    sinks = torch.randn(6) if form in ("sinks", "all") else None
    scoring = Scoring(0.6, 1.3 if form in ("softcap", "all") else None)
    fast = GatherAttention(pools[0].buffer, TorchOps(), scoring=scoring, window=window)
    slow = ReferenceAttention(pools[1].buffer, scoring=scoring, window=window)
    for layer in range(LAYERS):
        got = fast.run(layer, q, k, v, fast.plan(batch), sinks=sinks)
        want = slow.run(layer, q, k, v, slow.plan(batch), sinks=sinks)
        assert float((got - want).abs().max()) < 3e-6
    same = pools[0].buffer.data.nan_to_num(9.0) == pools[1].buffer.data.nan_to_num(9.0)
    assert bool(same.all()), "both wrote the same slots, and only those"


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_is_kept_is_read_and_not_written(page_size):
    """K and V below `write_from` stay as they are; queries there see them and not their own."""
    torch.manual_seed(0)
    pool = make_pool(page_size, kv_heads=2, groups=2, dtype=KVDtype.FP32)
    slots = np.random.default_rng(0).permutation(40).astype(np.int64)
    kept, end = 12, 23
    whole = RaggedBatch((RowSpan(0, 0, kept, slots),), page_size)
    q = torch.randn(end, 4, 8)
    k, v = torch.randn(2, end, 2, 8)
    attention = GatherAttention(pool.buffer, TorchOps())
    attention.run(0, q[:kept], k[:kept], v[:kept], attention.plan(whole))
    before = pool.buffer.data[:, :, 0].clone()
    want = attention.run(
        0,
        q[5:],
        k[5:],
        v[5:],
        attention.plan(RaggedBatch((RowSpan(0, 5, end - 5, slots),), page_size)),
    )
    wrong = torch.full_like(k[5:], torch.nan), torch.full_like(v[5:], torch.nan)
    for mine, right in zip(wrong, (k, v), strict=True):
        mine[kept - 5 :] = right[kept:]
    spans = (RowSpan(0, 5, end - 5, slots, write_from=kept),)
    again = RaggedBatch(spans, page_size)
    got = attention.run(0, q[5:], *wrong, attention.plan(again))
    assert torch.equal(got, want)
    rows = [(pos, slots[pos // page_size], pos % page_size) for pos in range(kept)]
    for _, slot, offset in rows:
        assert torch.equal(pool.buffer.data[slot, :, 0, :, offset], before[slot, :, :, offset])


def test_a_chunk_in_a_window_layer_costs_tokens_times_window():
    """Keys that are multiplied: at most window + band for each query, whatever lies before."""
    pool = make_pool(16, kv_heads=2, groups=2, dtype=KVDtype.FP32)
    planner = gather_plan.Planner(pool.buffer, 128)
    costs = []
    for start in (0, 4096, 65536):
        base = max(0, start - 127) // 16
        span = RowSpan(0, start, 1000, np.arange(-(-(start + 1000) // 16) - base), base=base)
        (chunk,) = planner.plan(RaggedBatch((span,), 16)).banded
        costs.append(sum((b.high - b.low) * (b.key_high - b.key_low) for b in chunk.bands))
        assert chunk.block.high - chunk.block.low <= 1000 + 127
    assert costs[1] == costs[2] < 1000 * (128 + 128)
    assert costs[0] <= costs[1]


def test_a_decode_in_a_window_layer_gathers_the_windows_pages_only():
    pool = make_pool(16, kv_heads=2, groups=2, dtype=KVDtype.FP32)
    planner = gather_plan.Planner(pool.buffer, 100)
    spans = [
        RowSpan(
            i,
            end - 1,
            1,
            np.arange(-(-end // 16) - max(0, end - 100) // 16),
            base=max(0, end - 100) // 16,
        )
        for i, end in enumerate((7, 100, 5000, 16000))
    ]
    plan = planner.plan(RaggedBatch(tuple(spans), 16))
    assert sum(d.index.shape[-2] for d in plan.decodes) == 4
    assert max(d.index.shape[-1] for d in plan.decodes) <= -(-100 // 16) + 1
