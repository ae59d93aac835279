"""Attention token by token, from the definition: the oracle of the fast backend."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from phloem.attention.batch import RaggedBatch
from phloem.kernels import KVBuffer, Scoring
from phloem.kernels.reference import ReferenceOps, paged_attention

__all__ = ["ReferenceAttention"]


class ReferenceAttention:
    """Slow. Its plan is the batch itself. Arguments as those of `GatherAttention`."""

    def __init__(
        self, buffer: KVBuffer, *, scoring: Scoring | None = None, window: int | None = None
    ) -> None:
        self._buffer, self._window = buffer, window
        self._scoring = scoring or Scoring(buffer.head_dim**-0.5)
        self._ops = ReferenceOps()

    def plan(self, batch: RaggedBatch) -> RaggedBatch:
        return batch

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: RaggedBatch,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self._write(layer, k, v, meta)
        parts = []
        for span in meta.spans:
            out, _ = paged_attention(
                q[span.first : span.first + span.count],
                self._buffer,
                layer,
                dict(enumerate(span.slots.tolist(), span.base)),
                span.start,
                scoring=self._scoring,
                earliest=partial(span.earliest, self._window),
                sinks=sinks,
            )
            parts.append(out)
        return torch.cat(parts).reshape(q.shape[0], -1)

    def _write(self, layer: int, k: Tensor, v: Tensor, batch: RaggedBatch) -> None:
        written = batch.written()
        which = np.arange(batch.num_tokens) if written is None else written
        offsets = batch.positions() % batch.page_size
        index = self._buffer.token_index(batch.token_slots()[which], offsets[which])
        self._ops.write_kv(self._buffer, layer, k[which], v[which], torch.from_numpy(index))
