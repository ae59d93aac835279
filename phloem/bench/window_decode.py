"""A window layer's decode step at 16K tokens of context against at a window's length.

One row of one token, a layer of Gemma 3's kind (8 heads on 4, of 256, window 1,024, pages of 16),
bf16, as `worker` hands it to attention: the row's window pages, whatever lies before them left out.
Timed is one layer, its share of the step's plan included, by the kernels of `--kernels auto`; both
contexts by turns, each first in every other pair. As a control, afterwards (it empties the caches):
a layer without a window at 16K tokens, over the same.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from phloem.attention import AttentionBackend, GatherAttention, RaggedBatch, RowSpan
from phloem.attention.native import NativeAttention
from phloem.bench.report import Result, paired_ratio
from phloem.kernels import KVBuffer, cpu_kernels, make_ops
from phloem.kernels.native import NativeKernels
from phloem.kv.layout import PageLayout, default_head_groups
from phloem.kv.sizing import pages_for_tokens
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.pools import DevicePool

__all__ = ["measure_decode"]

CONTEXT, WINDOW, PAGE_SIZE = 16_384, 1_024, 16
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 256
CALLS = 4  # in one sample


class _Layer:
    """One layer over pages of its own."""

    def __init__(self, context: int, window: int | None, native: NativeKernels | None) -> None:
        spec = KVSpec(
            kind=AttentionKind.GQA,
            dtype=KVDtype.BF16,
            num_layers=1,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            page_size=PAGE_SIZE,
            retention=window,
        )
        position = context - 1
        base = 0 if window is None else max(0, position - window + 1) // PAGE_SIZE
        num_pages = pages_for_tokens(context, PAGE_SIZE) - base
        pool = DevicePool(
            PageLayout(spec, num_pages, default_head_groups(KV_HEADS)), device=torch.device("cpu")
        )
        pool.buffer.data.normal_()
        slots = np.random.default_rng(0).permutation(num_pages).astype(np.int64)
        span = RowSpan(0, position, 1, slots, base=base)
        self._batch = RaggedBatch((span,), PAGE_SIZE)
        self._attention = _attention(pool.buffer, window, native)
        self._q = torch.randn(1, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        self._k, self._v = torch.randn(2, 1, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)

    def seconds(self) -> float:
        started = time.perf_counter()
        for _ in range(CALLS):
            meta = self._attention.plan(self._batch)
            self._attention.run(0, self._q, self._k, self._v, meta)
        return time.perf_counter() - started


def _attention(
    buffer: KVBuffer, window: int | None, native: NativeKernels | None
) -> AttentionBackend[Any]:
    if native is None:
        return GatherAttention(buffer, make_ops("torch"), window=window)
    return NativeAttention(buffer, native, window=window)


@torch.inference_mode()
def measure_decode(rounds: int) -> list[Result]:
    """`decode_16k_over_window` and its control."""
    native = NativeKernels() if cpu_kernels() == "native" else None
    long, short = _Layer(CONTEXT, WINDOW, native), _Layer(WINDOW, WINDOW, native)
    whole = _Layer(CONTEXT, None, native)
    for layer in (long, short, whole):
        layer.seconds()
    pairs = [_pair(long, short, turn) for turn in range(rounds)]
    control = [_pair(whole, short, turn) for turn in range(rounds)]
    sides = ("16k_s", "window_s")
    return [
        paired_ratio("decode_16k_over_window", pairs, sides=sides),
        paired_ratio("decode_16k_without_window_over_window", control, sides=sides),
    ]


def _pair(layer: _Layer, other: _Layer, turn: int) -> tuple[float, float]:
    """Seconds of both; whoever comes second may profit or suffer, so they take turns."""
    if turn % 2:
        after = other.seconds()
        return layer.seconds(), after
    return layer.seconds(), other.seconds()
