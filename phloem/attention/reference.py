"""Attention token by token, from the definition: the oracle of the fast backend."""

from __future__ import annotations

import torch
from torch import Tensor

from phloem.attention.batch import RaggedBatch
from phloem.kernels import KVBuffer
from phloem.kernels.reference import ReferenceOps, paged_attention

__all__ = ["ReferenceAttention"]


class ReferenceAttention:
    """Slow. Its plan is the batch itself."""

    def __init__(self, buffer: KVBuffer) -> None:
        self._buffer = buffer
        self._ops = ReferenceOps()

    def plan(self, batch: RaggedBatch) -> RaggedBatch:
        return batch

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, meta: RaggedBatch) -> Tensor:
        offsets = meta.positions() % meta.page_size
        index = self._buffer.token_index(meta.token_slots(), offsets)
        self._ops.write_kv(self._buffer, layer, k, v, torch.from_numpy(index).to(q.device))
        parts = []
        for span in meta.spans:
            queries = q[span.first : span.first + span.count]
            out, _ = paged_attention(queries, self._buffer, layer, span.slots.tolist(), span.start)
            parts.append(out)
        return torch.cat(parts).reshape(q.shape[0], -1)
