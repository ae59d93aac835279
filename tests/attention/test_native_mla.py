"""Native latent attention over pages of every dtype, absorbed and expanded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from phloem.attention import MLAReferenceAttention, RaggedBatch, RowSpan, native_mla
from phloem.attention.mla import Way
from phloem.attention.native_mla import NativeLatentAttention, cheaper_way
from phloem.kernels.native_latent import NativeLatentKernels
from phloem.kernels.native_pack import pack_up
from phloem.kv.spec import KVDtype
from tests.attention.test_mla import (
    HEADS,
    LAYERS,
    SCORING,
    SIZES,
    V3,
    fill_earlier,
    inputs,
    make_pool,
    random_batches,
    weights,
)
from tests.kernels.native_build import native_library
from tests.long import checkered


@pytest.fixture(scope="module")
def kernels():
    native_library()
    context = NativeLatentKernels(threads=2)
    yield context
    context.close()


def packed(up, mla):
    return [pack_up(weight.view(-1, mla.up_dim, mla.kv_rank), mla.nope_dim) for weight in up]


def backend(kernels, pool, mla, up, way=None):
    return NativeLatentAttention(
        pool.buffer, kernels, mla=mla, up=packed(up, mla), scoring=SCORING, way=way
    )


def test_numbers_that_are_not_fp32_are_refused(kernels):
    """Of the right size as well: the kernels read what they are told."""
    up = packed(weights(SIZES), SIZES)[0]
    out = torch.empty(3, HEADS, SIZES.kv_rank)
    for dtype in (torch.bfloat16, torch.int32):
        with pytest.raises(ValueError, match="x must be fp32"):
            kernels.heads_linear(torch.ones(3, HEADS, SIZES.nope_dim).to(dtype), up.absorb, out)


def with_gaps(batch: RaggedBatch) -> RaggedBatch:
    """The same rows, of whose longer ones every other page is another rank's to compute."""
    spans, first = [], 0
    for span in batch.spans:
        at = span.positions()
        kept = at[(at // batch.page_size) % 2 == (at[-1] // batch.page_size) % 2]
        spans.append(
            replace(span, first=first, start=int(kept[0]), count=len(kept), at=kept)
            if span.count > 1
            else replace(span, first=first)
        )
        first += spans[-1].count
    return RaggedBatch(tuple(spans), batch.page_size)


@pytest.mark.parametrize(
    ("way", "dtype", "page_size", "gaps"),
    checkered([*Way, None], list(zip(KVDtype, (1, 4, 16, 1, 4), strict=True)), [0, 1]),
    ids=str,
)
def test_both_ways_equal_the_definition(kernels, way, page_size, dtype, gaps, monkeypatch):
    """In runs of 5 expanded tokens; every slot that holds no token of a row is NaN, and none of it
    is seen; and the rows that are written are the same bytes."""
    monkeypatch.setattr(native_mla, "EXPANDED_BYTES", 0)
    monkeypatch.setattr(native_mla, "LEAST_RUN_TOKENS", 5)
    torch.manual_seed(page_size)
    for mla, whole in random_batches(page_size):
        batch = with_gaps(whole) if gaps else whole
        pools = [make_pool(mla, page_size, dtype) for _ in range(2)]
        ended = RaggedBatch(
            tuple(replace(s, start=s.end, count=0, at=None) for s in whole.spans), page_size
        )
        fill_earlier(pools[0], ended if gaps else whole)
        pools[1].buffer.data.copy_(pools[0].buffer.data)
        up = weights(mla)
        fast = backend(kernels, pools[0], mla, up, way)
        slow = MLAReferenceAttention(pools[1].buffer, mla=mla, up=up, scoring=SCORING)
        for layer in range(LAYERS):
            q, rows = inputs(mla, batch.num_tokens)
            args = (layer, q, rows, rows[..., : mla.kv_rank])
            got, want = (a.run(*args, a.plan(batch)) for a in (fast, slow))
            assert got.shape == (batch.num_tokens, HEADS * mla.v_dim)
            assert float((got - want).abs().max()) < 1e-5 * max(1.0, float(want.abs().max()))
            part, lse = fast.partial(layer, q, fast.plan(batch))
            assert torch.equal(part.flatten(1), got)
            want_lse = slow.partial(layer, q, slow.plan(batch))[1]
            assert float((lse - want_lse).abs().max()) < 1e-4
        assert torch.equal(*(pool.buffer.data.view(torch.uint8) for pool in pools))


@pytest.mark.parametrize("heads", [1, 11, 16, 40])
@pytest.mark.parametrize("dtype", [KVDtype.FP32, KVDtype.INT8], ids=lambda d: d.value)
def test_many_heads_and_a_context_of_several_parts(kernels, heads, dtype):
    """Few heads take the kernel of decodes, many a tile of them; both cut a long context."""
    torch.manual_seed(heads)
    mla, page_size = SIZES, 16
    pool = make_pool(mla, page_size, dtype)
    up = [0.3 * torch.randn(heads * mla.up_dim, mla.kv_rank) for _ in range(LAYERS)]
    slots = np.random.default_rng(1).permutation(400)[:50].astype(np.int64)
    spans = (RowSpan(0, 780, 1, slots[:49]), RowSpan(1, 3, 1, slots[49:]))
    batch = RaggedBatch(spans, page_size)
    fill_earlier(pool, batch)
    q = torch.randn(2, heads, mla.nope_dim + mla.rope_dim)
    rows = torch.randn(2, 1, mla.row_dim)
    fast = backend(kernels, pool, mla, up)
    slow = MLAReferenceAttention(pool.buffer, mla=mla, up=up, scoring=SCORING)
    got = fast.run(0, q, rows, rows[..., : mla.kv_rank], fast.plan(batch))
    want = slow.attend(0, q, slow.plan(batch))
    assert float((got - want).abs().max()) < 1e-5 * max(1.0, float(want.abs().max()))


def test_a_row_does_not_depend_on_its_batch(kernels):
    """To the last bit: alone, and beside a chunk that is expanded."""
    torch.manual_seed(0)
    pool, up = make_pool(SIZES, 4), weights(SIZES)
    chunk = RowSpan(1, 0, 90, np.arange(100, 123))
    row = RowSpan(0, 70, 1, np.arange(18))
    both = RaggedBatch((row, chunk), 4)
    fill_earlier(pool, both)
    attention = backend(kernels, pool, SIZES, up)
    plan = attention.plan(both)
    assert plan.expanded == (chunk,)
    q, rows = inputs(SIZES, 91)
    beside = attention.run(0, q, rows, rows[..., : SIZES.kv_rank], plan)
    alone = attention.attend(0, q[:1], attention.plan(RaggedBatch((row,), 4)))
    assert torch.equal(beside[:1], alone)


def test_the_way_with_fewer_multiplications():
    """A decode is absorbed, a cold chunk expanded; a short turn on a long context is absorbed."""
    for queries, before, way in (
        (1, 1, Way.ABSORBED),
        (1, 8000, Way.ABSORBED),
        (1000, 0, Way.EXPANDED),
        (40, 8000, Way.ABSORBED),
        (2000, 8000, Way.EXPANDED),
    ):
        pairs = queries * before + queries * (queries + 1) // 2
        assert cheaper_way(V3, queries=queries, keys=queries + before, pairs=pairs) is way
