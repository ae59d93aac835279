"""Attention by the native CPU kernels: pages are read in place, nothing is gathered."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from phloem.attention.backend import AttentionBackend
from phloem.attention.batch import RaggedBatch
from phloem.kernels import KVBuffer, Scoring
from phloem.kernels.native import NativeBatch, NativeKernels, kv_layer

__all__ = ["NativeAttention", "native_batch"]


def native_batch(batch: RaggedBatch) -> NativeBatch:
    """A batch as the kernels read it."""
    width = max((len(span.slots) for span in batch.spans), default=1)
    tables = np.zeros((len(batch.spans), width), dtype=np.int64)
    for row, span in zip(tables, batch.spans, strict=True):
        row[: len(span.slots)] = span.slots
    starts = [span.first for span in batch.spans] + [batch.num_tokens]
    bounds = [(span.base, span.read_from, span.write_from) for span in batch.spans]
    return NativeBatch(
        np.array(starts, dtype=np.int32),
        batch.positions().astype(np.int32),
        tables,
        np.array(bounds, dtype=np.int32).reshape(-1, 3).T,
    )


class NativeAttention(AttentionBackend[NativeBatch]):
    """Ragged prefill chunks and decodes over the pages of `buffer`, on the CPU.

    `scoring` None: products divided by the root of the head dimension.
    """

    def __init__(
        self,
        buffer: KVBuffer,
        kernels: NativeKernels,
        *,
        scoring: Scoring | None = None,
        window: int | None = None,
    ) -> None:
        self._kernels, self._buffer = kernels, buffer  # kv_layer only borrows the buffer
        self._scoring, self._window = scoring, window
        self._layers = tuple(kv_layer(buffer, i) for i in range(buffer.num_layers))

    @property
    def window(self) -> int | None:
        return self._window

    def plan(self, batch: RaggedBatch) -> NativeBatch:
        native = self.plan_write(batch)
        self._kernels.check_batch(self._layers[0], native, 1 << 30, window=self._window or 0)
        return native

    def over(self, buffer: KVBuffer, layer: int) -> NativeAttention:  # noqa: ARG002 - all are alike
        return NativeAttention(buffer, self._kernels, scoring=self._scoring, window=self._window)

    def plan_write(self, batch: RaggedBatch) -> NativeBatch:
        return native_batch(batch)

    def write(self, layer: int, k: Tensor, v: Tensor, meta: NativeBatch) -> None:
        self._kernels.rope_kv_write(None, (k, v), self._layers[layer], meta)

    def attend(
        self, layer: int, q: Tensor, meta: NativeBatch, *, sinks: Tensor | None = None
    ) -> Tensor:
        sinks = None if sinks is None else sinks.float()
        return self._attend(layer, q, meta, sinks, None).flatten(1)

    def partial(self, layer: int, q: Tensor, meta: NativeBatch) -> tuple[Tensor, Tensor]:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        return self._attend(layer, q, meta, None, lse), lse

    def _attend(
        self, layer: int, q: Tensor, meta: NativeBatch, sinks: Tensor | None, lse: Tensor | None
    ) -> Tensor:
        return self._kernels.attention(
            q,
            self._layers[layer],
            meta,
            window=self._window or 0,
            sinks=sinks,
            lse=lse,
            scoring=self._scoring,
        )
