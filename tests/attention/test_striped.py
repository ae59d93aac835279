"""Spans with gaps, between which other ranks have written: against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phloem.attention import (
    GatherAttention,
    RaggedBatch,
    ReferenceAttention,
    RowSpan,
    bands,
    gather_plan,
)
from phloem.attention.native import NativeAttention
from phloem.kernels import Scoring, TorchOps
from phloem.kernels.native import NativeKernels
from phloem.kv.spec import KVDtype
from phloem.pools import DevicePool
from tests.attention.test_paged import LAYERS, NUM_PAGES, make_pool
from tests.kernels.native_build import native_library

HEADS, KV_HEADS, DIM = 6, 2, 8


@pytest.fixture(scope="module")
def kernels():
    native_library()
    context = NativeKernels(threads=2)
    yield context
    context.close()


def striped_batch(rng: np.random.Generator, page_size: int, window: int | None) -> RaggedBatch:
    """Rows of which some pages are this rank's: chunks of up to 40 tokens anywhere, some restarted,
    some with one own token, some without a gap."""
    free = rng.permutation(NUM_PAGES).astype(np.int64).tolist()
    spans, first = [], 0
    for _ in range(rng.integers(1, 6)):
        start, count = int(rng.integers(0, 90)), int(rng.choice([2, 7, 20, 40]))
        chunk = np.arange(start, start + count)
        own = rng.integers(0, rng.integers(2, 4), start + count) == 0  # by page
        at = chunk[own[chunk // page_size]]
        if not len(at):
            continue
        read_from = int(rng.choice([0, at[0] // 2])) if window is not None else 0
        base = 0 if window is None else max(read_from, int(at[0]) - window + 1, 0) // page_size
        slots = np.array([free.pop() for _ in range(int(at[-1]) // page_size + 1 - base)])
        gaps = at[-1] - at[0] >= len(at)
        span = RowSpan(
            first,
            int(at[0]),
            len(at),
            slots,
            base=base,
            read_from=read_from,
            write_from=int(rng.integers(0, at[-1])) if window is None else 0,
            at=at if gaps else None,
        )
        spans.append(span)
        first += len(at)
    return RaggedBatch(tuple(spans), page_size)


def fill_others(pool: DevicePool, batch: RaggedBatch, window: int | None) -> None:
    """What a span may read and does not write itself; all else stays NaN."""
    size = batch.page_size
    for span in batch.spans:
        written = {p for p in span.positions().tolist() if p >= span.write_from}
        for pos in range(span.earliest(window), span.end):
            if pos not in written:
                page = pool.buffer.data[span.slots[pos // size - span.base]]
                page[..., pos % size, :, :] = torch.randn(page[..., pos % size, :, :].shape)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("form", ["plain", "all"])
def test_spans_with_gaps_equal_the_definition(
    kernels, backend, page_size, window, form, monkeypatch
):
    """Results, partial results and what is written; what no query may see is NaN. Red if a kernel
    takes a token's place in its span for its position, or masks or reads too much or too little."""
    monkeypatch.setattr(gather_plan, "CONTEXT_BLOCK_TOKENS", 13)
    monkeypatch.setattr(gather_plan, "MIN_BAND", 4)
    monkeypatch.setattr(gather_plan, "MAX_BAND", 8)
    monkeypatch.setattr(bands, "FULL_BAND", 5)
    torch.manual_seed(1)
    rng = np.random.default_rng([page_size, window or 0, len(form)])
    for _ in range(2):
        pools = [make_pool(page_size, kv_heads=2, groups=2, dtype=KVDtype.FP32) for _ in range(2)]
        batch = striped_batch(rng, page_size, window)
        fill_others(pools[0], batch, window)
        pools[1].buffer.data.copy_(pools[0].buffer.data)
        q = torch.randn(batch.num_tokens, HEADS, DIM)
        k, v = torch.randn(2, batch.num_tokens, KV_HEADS, DIM)
        sinks = torch.randn(HEADS) if form == "all" else None
        scoring = Scoring(0.6, 1.3 if form == "all" else None)
        options = {"scoring": scoring, "window": window}
        if backend == "native":
            fast = NativeAttention(pools[0].buffer, kernels, **options)
        else:
            fast = GatherAttention(pools[0].buffer, TorchOps(), **options)
        slow = ReferenceAttention(pools[1].buffer, **options)
        meta = fast.plan(batch)
        for layer in range(LAYERS):
            got = fast.run(layer, q, k, v, meta, sinks=sinks)
            want = slow.run(layer, q, k, v, batch, sinks=sinks)
            torch.testing.assert_close(got, want, rtol=0, atol=5e-6)
        parts = zip(fast.partial(0, q, meta), slow.partial(0, q, batch), strict=True)
        for mine, theirs in parts:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-6)
        same = pools[0].buffer.data.nan_to_num(9.0) == pools[1].buffer.data.nan_to_num(9.0)
        assert bool(same.all()), "both wrote the same slots, and only those"


def test_a_band_of_a_window_costs_its_positions(monkeypatch):
    """Keys that a rank of two multiplies in a window layer: half of what one rank does, and no more
    than a page's worth on top."""
    pool = make_pool(16, kv_heads=2, groups=2, dtype=KVDtype.FP32)
    planner = gather_plan.Planner(pool.buffer, 128)
    at = np.arange(4096, 6096)
    costs = []
    for own in (at, at[at // 16 % 2 == 0]):
        gaps = None if len(own) == len(at) else own
        base = (int(own[0]) - 127) // 16
        slots = np.arange(int(own[-1]) // 16 + 1 - base)
        span = RowSpan(0, int(own[0]), len(own), slots, base=base, at=gaps)
        (chunk,) = planner.plan(RaggedBatch((span,), 16)).banded
        costs.append(sum((b.high - b.low) * (b.key_high - b.key_low) for b in chunk.bands))
    assert costs[1] <= 0.55 * costs[0]
