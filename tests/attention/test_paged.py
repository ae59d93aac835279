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
from phloem.kernels import TorchOps
from phloem.kv.layout import PageLayout
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.pools import DevicePool

NUM_PAGES, LAYERS = 400, 2
TOLERANCES = {KVDtype.FP32: 3e-6, KVDtype.BF16: 2e-2}


def make_pool(page_size: int, *, kv_heads: int, groups: int, dtype: KVDtype) -> DevicePool:
    spec = KVSpec(
        kind=AttentionKind.GQA,
        dtype=dtype,
        num_layers=LAYERS,
        num_kv_heads=kv_heads,
        head_dim=8,
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
            page[..., pos % size, :, :] = torch.randn(page[..., pos % size, :, :].shape).to(
                page.dtype
            )


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("kv_heads", "groups"), [(2, 2), (3, 1), (4, 2)])
@pytest.mark.parametrize("dtype", list(KVDtype), ids=lambda d: d.value)
@pytest.mark.parametrize("seed", range(6))
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
    kind = pool.buffer.data.dtype
    q = torch.randn(batch.num_tokens, 2 * kv_heads, 8).to(kind)
    k, v = torch.randn(2, batch.num_tokens, kv_heads, 8).to(kind)
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
