"""Attention token by token, from the definition: the oracle of the fast backend."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from phloem.attention.backend import AttentionBackend
from phloem.attention.batch import RaggedBatch
from phloem.kernels import KVBuffer, Scoring
from phloem.kernels.reference import ReferenceOps, paged_attention

__all__ = ["ReferenceAttention", "write_batch"]


class ReferenceAttention(AttentionBackend[RaggedBatch]):
    """Slow. Its plan is the batch itself. Arguments as those of `GatherAttention`."""

    def __init__(
        self, buffer: KVBuffer, *, scoring: Scoring | None = None, window: int | None = None
    ) -> None:
        self._buffer, self._window = buffer, window
        self._scoring = scoring or Scoring(buffer.head_dim**-0.5)

    @property
    def window(self) -> int | None:
        return self._window

    def plan(self, batch: RaggedBatch) -> RaggedBatch:
        return batch

    def plan_write(self, batch: RaggedBatch) -> RaggedBatch:
        return batch

    def over(self, buffer: KVBuffer, layer: int) -> ReferenceAttention:  # noqa: ARG002 - all alike
        return ReferenceAttention(buffer, scoring=self._scoring, window=self._window)

    def attend(
        self, layer: int, q: Tensor, meta: RaggedBatch, *, sinks: Tensor | None = None
    ) -> Tensor:
        return self._attend(layer, q, meta, sinks)[0].flatten(1)

    def partial(self, layer: int, q: Tensor, meta: RaggedBatch) -> tuple[Tensor, Tensor]:
        return self._attend(layer, q, meta, None)

    def _attend(
        self, layer: int, q: Tensor, meta: RaggedBatch, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        for span in meta.spans:
            for low, start, count in span.runs():
                at = slice(span.first + low, span.first + low + count)
                out[at], lse[at] = paged_attention(
                    q[at],
                    self._buffer,
                    layer,
                    dict(enumerate(span.slots.tolist(), span.base)),
                    start,
                    scoring=self._scoring,
                    earliest=partial(span.earliest, self._window),
                    sinks=sinks,
                )
        return out, lse

    def write(self, layer: int, k: Tensor, v: Tensor, meta: RaggedBatch) -> None:
        write_batch(self._buffer, layer, k, v, meta)


def write_batch(buffer: KVBuffer, layer: int, k: Tensor, v: Tensor, batch: RaggedBatch) -> None:
    """Write k and v of a batch's tokens, those that it writes, to their pages."""
    written = batch.written()
    which = np.arange(batch.num_tokens) if written is None else written
    offsets = batch.positions() % batch.page_size
    index = buffer.token_index(batch.token_slots()[which], offsets[which])
    ReferenceOps().write_kv(buffer, layer, k[which], v[which], torch.from_numpy(index))
