"""Packed pages by the native kernels: PyTorch's bytes, and attention over any bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phloem.kernels import KVBuffer, make_codec
from phloem.kernels.native import NativeBatch, kv_layer
from phloem.kernels.reference import paged_attention
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from tests.kernels.test_codec import rows_of

PACKED = [d for d in KVDtype if d.is_packed]
LAYER, LAYERS, PAGE = 1, 2, 4
# heads, KV heads, head groups, head dim
SHAPES = [(9, 3, 3, 64), (4, 4, 2, 32), (16, 1, 1, 16), (4, 2, 2, 128), (6, 2, 1, 48)]


def pool(dtype, kv_heads, groups, dim, pages):
    """A pool of poisoned pages: all ones reads as NaN."""
    spec = KVSpec(
        kind=AttentionKind.GQA,
        dtype=dtype,
        num_layers=LAYERS,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=PAGE,
    )
    size = (pages + 1, groups, LAYERS, 2, PAGE, kv_heads // groups, spec.row_items)
    data = torch.full(size, 0xFF, dtype=torch.uint8)
    return KVBuffer(data, make_codec(spec, torch.float32))


def one_row(count, start=0, pages=None):
    """Tokens start ... start + count - 1 of one request, its pages in falling order."""
    pages = -(-(start + count) // PAGE) if pages is None else pages
    positions = np.arange(start, start + count, dtype=np.int32)
    table = np.arange(pages, dtype=np.int64)[::-1][None]
    return NativeBatch(np.array([0, count], dtype=np.int32), positions, table)


def held(buffer, side, tokens):
    """The bytes of K or V of `one_row`, (tokens, KV heads, row)."""
    pages = -(-tokens // PAGE)
    rows = buffer.data[torch.arange(pages).flip(0), :, LAYER, side]  # (P, G, T, h, items)
    return rows.permute(0, 2, 1, 3, 4).reshape(pages * PAGE, buffer.num_kv_heads, -1)[:tokens]


def awkward_rows(count, dim):
    """Rows thousands of times apart, and the borders: zeros, one number, halves, the smallest."""
    rows = rows_of(count, dim, seed=dim)
    rows[0] = 0.0
    rows[1] = 0.0
    rows[1, dim // 2] = -3.0
    rows[2] *= 1e-42
    rows[3] *= 1e30
    rows[4] = torch.arange(dim) / 2.0
    rows[5] = -torch.arange(dim) * 2.0**-11
    rows[6] = 5e-41
    rows[7, ::2] = -0.0
    return rows


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [16, 48, 64, 128])
@pytest.mark.parametrize("dtype", PACKED, ids=lambda d: d.value)
def test_what_is_written_is_pytorchs_to_the_bit(kernels, dtype, dim, compute):
    """Pages of one engine are read by another, whichever kernels it has."""
    count, kv_heads = 1200, 2
    buffer = pool(dtype, kv_heads, 1, dim, count // PAGE)
    k, v = (awkward_rows(kv_heads * count, dim).view(count, kv_heads, dim) for _ in range(2))
    k, v = k.to(compute), v.flip(0).to(compute)
    kernels.rope_kv_write(None, (k, v), kv_layer(buffer, LAYER), one_row(count))
    for side, rows in enumerate((k, v)):
        assert torch.equal(held(buffer, side, count), buffer.encode(rows))
    assert (buffer.data[:, :, 1 - LAYER] == 0xFF).all(), "the other layer is as it was"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", PACKED, ids=lambda d: d.value)
@pytest.mark.parametrize("count", [1, 40])
def test_attention_equals_the_definition_over_the_same_bytes(kernels, dtype, shape, count):
    """Decodes and chunks, and a single head's many queries; what holds no token stays NaN."""
    torch.manual_seed(3)
    heads, kv_heads, groups, dim = shape
    context = 333
    buffer = pool(dtype, kv_heads, groups, dim, -(-context // PAGE) + 2)
    k, v = torch.randn(2, context, kv_heads, dim)
    batch = one_row(count, context - count)
    kv = kv_layer(buffer, LAYER)
    kernels.rope_kv_write(None, (k, v), kv, one_row(context))
    q, lse = torch.randn(count, heads, dim), torch.empty(count, heads)
    out = kernels.attention(q, kv, batch, lse=lse)
    some = range(0, count, 13)
    for token in some:
        want, want_lse = paged_attention(
            q[token : token + 1], buffer, LAYER, batch.tables[0].tolist(), context - count + token
        )
        assert (out[token] - want[0]).abs().max() < 1e-5
        assert (lse[token] - want_lse[0]).abs().max() < 1e-5 * (1 + want_lse.abs().max())


@pytest.mark.parametrize("dim", [16, 48])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", PACKED, ids=lambda d: d.value)
def test_reading_is_the_definition_of_every_byte(kernels, dtype, count, dim):
    """Where a token sees only itself its output is its value: code times scale, of any bytes."""
    rng = np.random.default_rng(5)
    tokens = 600
    buffer = pool(dtype, 1, 1, dim, tokens // PAGE)
    codes = rng.integers(0, 256, (tokens, buffer.row_items), dtype=np.uint8)
    if dtype is KVDtype.FP4:
        codes[:, dim // 2 :] %= 0xF8  # finite scales
    else:
        scales = 2.0 ** rng.integers(-40, 40, tokens).astype(np.float32)
        codes[:, dim:] = scales.view(np.uint8).reshape(tokens, 4)[:, 2:]
        if dtype is KVDtype.FP8:  # its NaN is not written beside a finite scale
            codes[:, :dim][codes[:, :dim] & 0x7F == 0x7F] = 0x35
    rows = torch.from_numpy(codes)
    buffer.data[:-1, 0, LAYER, 1] = rows.view(-1, PAGE, 1, buffer.row_items)
    buffer.data[:-1, 0, LAYER, 0] = 0
    table = np.arange(tokens // PAGE, dtype=np.int64)[None]
    kv = kv_layer(buffer, LAYER)
    for first in range(0, tokens - count + 1, count):
        positions = np.arange(first, first + count, dtype=np.int32)
        batch = NativeBatch(np.array([0, count], dtype=np.int32), positions, table)
        got = kernels.attention(torch.zeros(count, 1, dim), kv, batch, window=1)
        assert torch.equal(got[:, 0], buffer.decode(rows[first : first + count]))
