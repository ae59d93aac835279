"""Native attention over the pages of one component, against the definition token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from phloem.attention import RaggedBatch, ReferenceAttention, RowSpan
from phloem.attention.native import NativeAttention
from phloem.kernels import Scoring
from phloem.kernels.native import NativeKernels
from phloem.kv.spec import KVDtype
from tests.attention.test_paged import LAYERS, fill_earlier, fill_window, make_pool, window_batch
from tests.kernels.native_build import native_library
from tests.long import few

# Of packed pages both sides read the same numbers, in fp32.
TOLERANCES = {dtype: 1e-5 for dtype in KVDtype} | {KVDtype.FP32: 5e-6, KVDtype.BF16: 2e-2}
NOWHERE = 1 << 40


@pytest.fixture(scope="module")
def kernels():
    native_library()
    context = NativeKernels(threads=2)
    yield context
    context.close()


def with_stale_entries(batch: RaggedBatch, window: int) -> RaggedBatch:
    """The same rows whose tables begin three pages earlier, if they can, with slots of no pool."""
    spans = []
    for span in batch.spans:
        base = max(0, span.base - 3)
        stale = np.full(span.base - base, NOWHERE, dtype=np.int64)
        low = span.earliest(window) // batch.page_size
        assert low >= span.base
        slots = np.concatenate([stale, span.slots])
        slots[: low - base] = NOWHERE
        spans.append(replace(span, slots=slots, base=base))
    return RaggedBatch(tuple(spans), batch.page_size)


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 70, 200])
@pytest.mark.parametrize("form", ["plain", "sinks", "softcap", "bf16"])
@pytest.mark.parametrize("seed", few(range(3), 1))
def test_windows_equal_the_definition_and_read_nothing_else(kernels, page_size, window, form, seed):
    """Ragged rows, restarted or not: what no window holds is NaN, and table entries before that
    point outside of the pool."""
    dtype = KVDtype.BF16 if form == "bf16" else KVDtype.FP32
    check_windows(kernels, page_size, window, form, dtype, seed)


@pytest.mark.parametrize(("page_size", "window"), [(1, 16), (4, 5), (16, 70)])
@pytest.mark.parametrize("form", ["plain", "sinks", "softcap"])
@pytest.mark.parametrize("dtype", [d for d in KVDtype if d.is_packed], ids=lambda d: d.value)
def test_windows_over_packed_pages(kernels, page_size, window, form, dtype):
    """The same; and both write the same bytes."""
    check_windows(kernels, page_size, window, form, dtype, page_size)


def check_windows(kernels, page_size, window, form, dtype, seed):
    torch.manual_seed(seed)
    rng = np.random.default_rng(1000 * window + seed)
    pools = [make_pool(page_size, kv_heads=2, groups=1 + seed % 2, dtype=dtype) for _ in range(2)]
    batch = window_batch(rng, page_size, window)
    fill_window(pools[0], batch, window)
    pools[1].buffer.data.copy_(pools[0].buffer.data)
    kind, dim = pools[0].buffer.dtype, pools[0].layout.spec.head_dim
    q = torch.randn(batch.num_tokens, 6, dim).to(kind)
    k, v = torch.randn(2, batch.num_tokens, 2, dim).to(kind)
    sinks = torch.randn(6) if form == "sinks" else None
    scoring = Scoring(0.6, 1.3 if form == "softcap" else None)
    fast = NativeAttention(pools[0].buffer, kernels, scoring=scoring, window=window)
    slow = ReferenceAttention(pools[1].buffer, scoring=scoring, window=window)
    meta = fast.plan(with_stale_entries(batch, window))
    for layer in range(LAYERS):
        got = fast.run(layer, q, k, v, meta, sinks=sinks).float()
        want = slow.run(layer, q, k, v, slow.plan(batch), sinks=sinks).float()
        assert float((got - want).abs().max()) < TOLERANCES[dtype]
    same = pools[0].buffer.data.nan_to_num(9.0) == pools[1].buffer.data.nan_to_num(9.0)
    assert bool(same.all()), "both wrote the same slots, and only those"


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_is_read_and_not_written(kernels, page_size, seed):
    """Full layers of restarted rows beside others: K and V below `write_from`, here NaN, stay out
    of the pages, and the queries there see what the pages hold."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    pools = [make_pool(page_size, kv_heads=2, groups=2, dtype=KVDtype.FP32) for _ in range(2)]
    free = rng.permutation(400).astype(np.int64).tolist()
    spans, first = [], 0
    for count in (1, 30, 1, 9):
        start = int(rng.integers(0, 40))
        slots = np.array([free.pop() for _ in range(-(-(start + count) // page_size))])
        write_from = int(rng.integers(0, start + count + 1))
        spans.append(RowSpan(first, start, count, slots, write_from=write_from))
        first += count
    batch = RaggedBatch(tuple(spans), page_size)
    whole = RaggedBatch(tuple(replace(s, start=s.end, count=0) for s in spans), page_size)
    fill_earlier(pools[0], whole)
    pools[1].buffer.data.copy_(pools[0].buffer.data)
    q = torch.randn(first, 4, 8)
    k, v = torch.randn(2, first, 2, 8)
    for span in spans:
        kept = slice(span.first, span.first + max(0, min(span.write_from - span.start, span.count)))
        k[kept], v[kept] = torch.nan, torch.nan
    fast, slow = NativeAttention(pools[0].buffer, kernels), ReferenceAttention(pools[1].buffer)
    got = fast.run(0, q, k, v, fast.plan(batch))
    want = slow.run(0, q, k, v, slow.plan(batch))
    assert float((got - want).abs().max()) < TOLERANCES[KVDtype.FP32]
    same = pools[0].buffer.data.nan_to_num(9.0) == pools[1].buffer.data.nan_to_num(9.0)
    assert bool(same.all()), "both wrote the same slots, and only those"


def test_a_chunk_in_a_window_layer_multiplies_its_windows_only(kernels):
    """A NaN in the chunk spoils its own window and the tile that it ends in, and no later product:
    a chunk costs tokens * window."""
    torch.manual_seed(0)
    window, count, heads = 40, 300, 2
    pool = make_pool(4, kv_heads=2, groups=2, dtype=KVDtype.FP32)
    batch = RaggedBatch((RowSpan(0, 0, count, np.arange(75)),), 4)
    attention = NativeAttention(pool.buffer, kernels, window=window)
    q = torch.randn(count, heads, 8)
    k, v = torch.randn(2, count, 2, 8)
    want = attention.run(0, q, k, v, attention.plan(batch))
    v[100] = torch.nan
    got = attention.run(0, q, k, v, attention.plan(batch))
    tile, block = 64, 96
    assert got[100:140].isnan().all()
    assert torch.equal(got[:64], want[:64])
    assert torch.equal(got[100 + window + tile + block :], want[100 + window + tile + block :])


def test_a_chunk_equals_the_same_tokens_in_smaller_chunks(kernels):
    """Bit for bit, with a window: sums are cut at absolute positions."""
    torch.manual_seed(0)
    pool = make_pool(4, kv_heads=2, groups=2, dtype=KVDtype.FP32)
    attention = NativeAttention(pool.buffer, kernels, window=50)
    q = torch.randn(250, 4, 8)
    k, v = torch.randn(2, 250, 2, 8)
    whole = RaggedBatch((RowSpan(0, 0, 250, np.arange(63)),), 4)
    want = attention.run(0, q, k, v, attention.plan(whole))
    pool.fill_nan(np.arange(63))
    for low, high in ((0, 100), (100, 103), (103, 250)):
        base = max(0, low - 49) // 4
        pages = np.arange(base, -(-high // 4))
        part = RaggedBatch((RowSpan(0, low, high - low, pages, base=base),), 4)
        at = slice(low, high)
        got = attention.run(0, q[at], k[at], v[at], attention.plan(part))
        assert torch.equal(got, want[at])


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (RowSpan(0, 40, 1, np.arange(4), base=8), "reads before its first page, number 8"),
        (RowSpan(0, 40, 1, np.arange(4), base=6, read_from=41), "reads from 41, begins at 40"),
        (RowSpan(0, 40, 1, np.arange(3), base=6), "beyond its 3 pages"),
        (RowSpan(0, 40, 1, np.array([1, 2, NOWHERE, 3, 4]), base=6), "slot 1099511627776"),
    ],
    ids=str,
)
def test_tables_that_lack_what_the_window_reads_are_refused(kernels, span, message):
    pool = make_pool(4, kv_heads=2, groups=1, dtype=KVDtype.FP32)
    attention = NativeAttention(pool.buffer, kernels, window=16)
    with pytest.raises(ValueError, match=message):
        attention.plan(RaggedBatch((span,), 4))
