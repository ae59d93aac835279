"""A window layer's decode step at 16K tokens of context against at a window's length.

One row of one token, a layer of Gemma 3's kind (8 heads on 4, of 256, window 1,024, pages of 16),
bf16, as `worker` hands it to attention: the row's window pages, whatever lies before them left out.
Timed is one layer, its share of the step's plan included; both contexts by turns. As a control, a
layer without a window at 16K tokens, over the same.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from phloem.attention import GatherAttention, RaggedBatch, RowSpan
from phloem.bench.report import Result, paired_ratio
from phloem.kernels import make_ops
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

    def __init__(self, context: int, window: int | None) -> None:
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
        self._attention = GatherAttention(pool.buffer, make_ops("torch"), window=window)
        self._q = torch.randn(1, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        self._k, self._v = torch.randn(2, 1, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)

    def seconds(self) -> float:
        started = time.perf_counter()
        for _ in range(CALLS):
            meta = self._attention.plan(self._batch)
            self._attention.run(0, self._q, self._k, self._v, meta)
        return time.perf_counter() - started


@torch.inference_mode()
def measure_decode(rounds: int) -> list[Result]:
    """`decode_16k_over_window` and its control."""
    long, short = _Layer(CONTEXT, WINDOW), _Layer(WINDOW, WINDOW)
    whole = _Layer(CONTEXT, None)
    for layer in (long, short, whole):
        layer.seconds()
    pairs, control = [], []
    for _ in range(rounds):
        at_window = short.seconds()
        pairs.append((long.seconds(), at_window))
        control.append((whole.seconds(), at_window))
    sides = ("16k_s", "window_s")
    return [
        paired_ratio("decode_16k_over_window", pairs, sides=sides),
        paired_ratio("decode_16k_without_window_over_window", control, sides=sides),
    ]
