"""Paged attention and the write of K and V, against attention token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from phloem.kernels import KVBuffer, ReferenceOps, Scoring
from phloem.kernels.native import NativeBatch, kv_layer
from phloem.kernels.reference import paged_attention

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCES)
LAYER, LAYERS = 1, 2
# heads, KV heads, head groups, head dim
SHAPES = [(9, 3, 3, 64), (4, 4, 2, 32), (8, 1, 1, 16), (4, 2, 2, 128), (6, 2, 1, 20), (5, 1, 1, 40)]


class Pages:
    """Rows in a pool whose every other slot is NaN. Slots are in random order."""

    def __init__(self, contexts, *, shape, page_size, dtype, seed=0):
        rng = np.random.default_rng(seed)
        _, kv_heads, groups, dim = shape
        counts = [-(-c // page_size) for c in contexts]
        pages = sum(counts) + 3
        size = (pages + 1, groups, LAYERS, 2, page_size, kv_heads // groups, dim)
        self.buffer = KVBuffer(torch.full(size, torch.nan, dtype=dtype))
        slots = rng.permutation(pages)
        self.tables = np.zeros((len(contexts), max(counts)), dtype=np.int64)
        self.slots, used = [], 0
        for row, count in enumerate(counts):
            self.tables[row, :count] = slots[used : used + count]
            self.slots.append(self.tables[row, :count].tolist())
            used += count
        self.page_size, self.dtype = page_size, dtype

    def fill(self, row, low, high):
        """Random K and V at positions low ... high - 1."""
        for pos in range(low, high):
            page = self.buffer.data[self.slots[row][pos // self.page_size], :, LAYER]
            part = page[:, :, pos % self.page_size]
            part.copy_(torch.randn(part.shape).to(self.dtype))

    def batch(self, contexts, counts):
        spans = zip(contexts, counts, strict=True)
        positions = np.concatenate([np.arange(c - n, c, dtype=np.int32) for c, n in spans])
        starts = np.cumsum([0, *counts]).astype(np.int32)
        return NativeBatch(starts, positions, self.tables)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "page_size"),
    [(SHAPES[0], size) for size in (1, 4, 16, 64)]
    + [(shape, size) for shape, size in zip(SHAPES[1:], (16, 4, 64, 1, 16), strict=True)],
    ids=str,
)
def test_ragged_batch_of_decodes_and_chunks(kernels, shape, page_size, dtype):
    """Output and LSE equal the definition, and no slot that holds no token is read."""
    contexts, counts = [1, 77, 300, 30, 117], [1, 1, 1, 30, 25]
    pages = Pages(contexts, shape=shape, page_size=page_size, dtype=dtype)
    for row, context in enumerate(contexts):
        pages.fill(row, 0, context)
    heads, _, _, dim = shape
    q = torch.randn(sum(counts), heads, dim).to(dtype)
    lse = torch.empty(sum(counts), heads)
    batch = pages.batch(contexts, counts)
    out = kernels.attention(q, kv_layer(pages.buffer, LAYER), batch, lse=lse)
    assert out.dtype is dtype
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        part = slice(batch.row_start[row], batch.row_start[row + 1])
        want, want_lse = paged_attention(
            q[part].float(), pages.buffer, LAYER, pages.slots[row], context - count
        )
        assert (out[part].float() - want).abs().max() < TOLERANCES[dtype]
        assert (lse[part] - want_lse).abs().max() < TOLERANCES[dtype] * 5


@pytest.mark.parametrize("counts", [[1, 1], [9, 40]])
@pytest.mark.parametrize("window", [1, 16, 50])
def test_window_reads_nothing_older(kernels, window, counts):
    """Slots before the oldest window hold NaN; the result equals attention over the window."""
    contexts, shape = [90, 130], (6, 2, 2, 32)
    pages = Pages(contexts, shape=shape, page_size=16, dtype=torch.float32)
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        pages.fill(row, max(0, context - count - window + 1), context)
    q = torch.randn(sum(counts), 6, 32)
    out = kernels.attention(
        q, kv_layer(pages.buffer, LAYER), pages.batch(contexts, counts), window=window
    )
    data, token = pages.buffer.data, 0
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        for pos in range(context - count, context):
            seen = range(max(0, pos - window + 1), pos + 1)
            kv = torch.stack([data[pages.slots[row][p // 16], :, LAYER, :, p % 16] for p in seen])
            k, v = kv[:, :, 0, 0], kv[:, :, 1, 0]  # (S, K, D)
            for head in range(6):
                scores = k[:, head // 3] @ q[token, head] / math.sqrt(32)
                want = torch.softmax(scores, 0) @ v[:, head // 3]
                assert (out[token, head] - want).abs().max() < 1e-5
            token += 1


@pytest.mark.parametrize("count", [1, 5])
def test_sinks_take_part_in_the_sum_only(kernels, count):
    pages = Pages([70], shape=(4, 2, 2, 16), page_size=4, dtype=torch.float32)
    pages.fill(0, 0, 70)
    q, sinks, lse = torch.randn(count, 4, 16), torch.randn(4), torch.empty(count, 4)
    batch, kv = pages.batch([70], [count]), kv_layer(pages.buffer, LAYER)
    plain = kernels.attention(q, kv, batch, lse=lse)
    total = torch.logaddexp(lse, sinks)
    want, sunk = plain * torch.exp(lse - total)[..., None], torch.empty(count, 4)
    assert (kernels.attention(q, kv, batch, sinks=sinks, lse=sunk) - want).abs().max() < 1e-5
    assert (sunk - total).abs().max() < 1e-5


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("softcap", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("scale", [1e-3, 0.3, 40.0])
def test_scores_are_scaled_and_bent(kernels, count, softcap, scale):
    """From scores far below the cap, where its tanh is a line, to such as it flattens."""
    shape, scoring = (4, 2, 2, 16), Scoring(scale, softcap)
    pages = Pages([70], shape=shape, page_size=4, dtype=torch.float32)
    pages.fill(0, 0, 70)
    q, lse = torch.randn(count, 4, 16), torch.empty(count, 4)
    kv = kv_layer(pages.buffer, LAYER)
    got = kernels.attention(q, kv, pages.batch([70], [count]), lse=lse, scoring=scoring)
    want, want_lse = paged_attention(
        q, pages.buffer, LAYER, pages.slots[0], 70 - count, scoring=scoring
    )
    assert (got - want).abs().max() < 2e-5
    assert (lse - want_lse).abs().max() < 1e-5 * (1 + softcap)


@pytest.mark.parametrize("scale", [0.2, 9.0])
@pytest.mark.parametrize("window", [0, 50, 150])
def test_a_chunk_equals_the_same_tokens_in_smaller_chunks(kernels, window, scale):
    """Bit for bit: sums are cut at absolute positions, not at the chunk's border, and shrink by
    what their own query has seen, be it often (scores of a wide range) or never."""
    pages = Pages([250], shape=(6, 2, 2, 32), page_size=16, dtype=torch.float32)
    pages.fill(0, 0, 250)
    q, kv = torch.randn(250, 6, 32), kv_layer(pages.buffer, LAYER)
    how = {"window": window, "scoring": Scoring(scale)}
    whole = kernels.attention(q, kv, pages.batch([250], [250]), **how)
    for low, high in ((0, 100), (100, 103), (103, 250)):
        part = kernels.attention(q[low:high], kv, pages.batch([high], [high - low]), **how)
        assert torch.equal(part, whole[low:high])


# Scores of each 60 positions: they rise by less and by more than what moves a query's reference,
# fall until the weights are 0, and lie below what e^x can tell from 0.
LEVELS = {
    "rising": [-20, -16, -12, -11, 0, 4, 20, 24],
    "falling": [24, 20, 4, 0, -11, -120, -200, -20],
    "far": [-300, -298, -200, -196, -150, -300, -152, -149],
}


@pytest.mark.parametrize(
    ("course", "softcap"), [("rising", None), ("falling", None), ("far", None), ("rising", 400.0)]
)
def test_scores_that_rise_and_fall_along_the_context(kernels, course, softcap):
    """Equal to the definition wherever a query's greatest score lies and however it got there."""
    shape, scoring, levels = (3, 1, 1, 32), Scoring(1.0, softcap), LEVELS[course]
    context, count = 60 * len(levels), 30
    pages = Pages([context], shape=shape, page_size=16, dtype=torch.float32)
    pages.fill(0, 0, context)
    direction = torch.nn.functional.normalize(torch.randn(32), dim=0)
    for pos in range(context):
        key = pages.buffer.data[pages.slots[0][pos // 16], 0, LAYER, 0, pos % 16, 0]
        key.copy_(direction * levels[pos // 60] + key * 0.2)
    q = direction + torch.randn(context, 3, 32) * 0.05
    for end in range(count, context + 1, 150):
        lse = torch.empty(count, 3)
        part, batch = q[end - count : end], pages.batch([end], [count])
        kv = kv_layer(pages.buffer, LAYER)
        got = kernels.attention(part, kv, batch, lse=lse, scoring=scoring)
        want, want_lse = paged_attention(
            part, pages.buffer, LAYER, pages.slots[0], end - count, scoring=scoring
        )
        assert (got - want).abs().max() < 1e-4  # a score of 300 is known to 3e-5
        assert (lse - want_lse).abs().max() < 2e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_decode_is_the_same_alone_and_among_others(kernels, dtype):
    """Bit for bit: how its context is cut depends on nothing but the row. Contexts end in the midst
    of fours of tokens, of blocks and of parts, and at their borders."""
    contexts, shape = [1, 6, 64, 65, 256, 259, 700], (9, 3, 3, 64)
    pages = Pages(contexts, shape=shape, page_size=16, dtype=dtype)
    for row, context in enumerate(contexts):
        pages.fill(row, 0, context)
    q, kv = torch.randn(len(contexts), 9, 64).to(dtype), kv_layer(pages.buffer, LAYER)
    together = kernels.attention(q, kv, pages.batch(contexts, [1] * len(contexts)))
    for row, context in enumerate(contexts):
        alone = NativeBatch(
            np.array([0, 1], dtype=np.int32),
            np.array([context - 1], dtype=np.int32),
            pages.tables[row : row + 1],
        )
        assert torch.equal(kernels.attention(q[row : row + 1], kv, alone)[0], together[row])


def test_nan_of_one_row_stays_in_it(kernels):
    contexts, shape = [40, 40], (3, 1, 1, 64)
    pages = Pages(contexts, shape=shape, page_size=16, dtype=torch.float32)
    pages.fill(0, 0, 40)  # row 1 stays NaN
    for counts in ([1, 1], [8, 8]):
        q = torch.randn(sum(counts), 3, 64)
        out = kernels.attention(q, kv_layer(pages.buffer, LAYER), pages.batch(contexts, counts))
        assert out[: counts[0]].isfinite().all()
        assert out[counts[0] :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_and_write(kernels, shape, norms, dtype):
    """q is rotated in place, k rotated into its slots, v copied; no other slot changes."""
    heads, kv_heads, _, dim = shape
    contexts, counts, ops = [9, 30], [1, 12], ReferenceOps()
    pages = Pages(contexts, shape=shape, page_size=4, dtype=dtype)
    qkv = torch.randn(13, heads + 2 * kv_heads, dim).to(dtype)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    angles = torch.randn(64, dim // 2)
    cos, sin = angles.cos(), angles.sin()
    weights = (torch.rand(dim), torch.rand(dim)) if norms else None
    positions = torch.tensor([8, *range(18, 30)])
    want = []
    for x, i in ((q, 0), (k, 1)):
        x = x.float()
        normed = x if weights is None else ops.rms_norm(x, weights[i], 1e-6)
        want.append(ops.rope(normed, cos[positions], sin[positions]))
    batch = pages.batch(contexts, counts)
    kernels.rope_kv_write(
        q, (k, v), kv_layer(pages.buffer, LAYER), batch, angles=(cos, sin), norms=weights, eps=1e-6
    )
    assert (q.float() - want[0]).abs().max() < TOLERANCES[dtype] * 4
    data = pages.buffer.data
    rows = [0] + [1] * 12
    for token, (row, pos) in enumerate(zip(rows, positions.tolist(), strict=True)):
        slot = data[pages.slots[row][pos // 4], :, LAYER, :, pos % 4]  # (G, 2, h, D)
        got_k, got_v = slot[:, 0].reshape(kv_heads, dim), slot[:, 1].reshape(kv_heads, dim)
        assert (got_k.float() - want[1][token]).abs().max() < TOLERANCES[dtype] * 4
        assert torch.equal(got_v, v[token])
        slot.fill_(torch.nan)
    assert data.isnan().all()


def test_batches_outside_the_pool_are_refused(kernels):
    pages = Pages([10], shape=(2, 1, 1, 16), page_size=4, dtype=torch.float32)
    kv = kv_layer(pages.buffer, LAYER)
    kernels.check_batch(kv, pages.batch([10], [2]), 10)
    with pytest.raises(ValueError, match="the context ends at 9"):
        kernels.check_batch(kv, pages.batch([10], [2]), 9)
    with pytest.raises(ValueError, match="beyond its 3 pages"):
        kernels.attention(torch.randn(1, 2, 16), kv, pages.batch([13], [1]))
    pages.tables[0, 1] = 99
    with pytest.raises(ValueError, match="slot 99 of row 0"):
        kernels.check_batch(kv, pages.batch([10], [2]), 10)
