"""Latent attention token by token, from the definition: K and V of every head, nothing absorbed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phloem.attention.backend import AttentionBackend
from phloem.attention.batch import RaggedBatch, RowSpan
from phloem.attention.reference import write_batch
from phloem.config.mla import MLAConfig
from phloem.kernels import KVBuffer, Scoring
from phloem.kernels.reference import ReferenceOps

__all__ = ["MLAReferenceAttention"]


class MLAReferenceAttention(AttentionBackend[RaggedBatch]):
    """Slow. Its plan is the batch itself. Arguments as those of `MLAAttention`."""

    def __init__(
        self,
        buffer: KVBuffer,
        *,
        mla: MLAConfig,
        up: Sequence[Tensor],
        scoring: Scoring,
        own_heads: bool = False,
    ) -> None:
        self._buffer, self._mla, self._up, self._scoring = buffer, mla, tuple(up), scoring
        self._own_heads = own_heads
        self._ops = ReferenceOps()

    @property
    def window(self) -> None:
        return None

    def plan(self, batch: RaggedBatch) -> RaggedBatch:
        return batch

    def write(self, layer: int, k: Tensor, v: Tensor, meta: RaggedBatch) -> None:
        """As `MLAAttention.write`."""
        write_batch(self._buffer, layer, k, v, meta)

    def plan_write(self, batch: RaggedBatch) -> RaggedBatch:
        return batch

    def over(self, buffer: KVBuffer, layer: int) -> MLAReferenceAttention:
        up = self._up[layer : layer + 1]
        return MLAReferenceAttention(
            buffer, mla=self._mla, up=up, scoring=self._scoring, own_heads=self._own_heads
        )

    def attend(
        self, layer: int, q: Tensor, meta: RaggedBatch, *, sinks: Tensor | None = None
    ) -> Tensor:
        """As `MLAAttention.attend`."""
        assert sinks is None, "latent attention has no sinks"
        return self.partial(layer, q, meta)[0].flatten(1)

    def partial(self, layer: int, q: Tensor, meta: RaggedBatch) -> tuple[Tensor, Tensor]:
        """As `MLAAttention.partial`."""
        out = q.new_empty((*q.shape[:2], self._mla.v_dim))
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        for span in meta.spans:
            for i, position in enumerate(span.positions().tolist(), span.first):
                out[i], lse[i] = self._attend(layer, q[i], span, position)
        return out, lse

    def ask(self, layer: int, q: Tensor) -> Tensor:
        """As `MLAAttention.ask`."""
        if not self._own_heads:
            return q
        nope, rotary = q[..., : self._mla.nope_dim], q[..., self._mla.nope_dim :]
        keys = self._heads(layer)[:, : self._mla.nope_dim]  # (H, nope, C)
        absorbed = torch.einsum("nhi,hic->nhc", nope.float(), keys)
        return torch.cat((absorbed.to(q.dtype), rotary), dim=-1)

    def partial_asked(self, layer: int, asked: Tensor, meta: RaggedBatch) -> tuple[Tensor, Tensor]:
        """As `MLAAttention.partial_asked`."""
        if not self._own_heads:
            return self.partial(layer, asked, meta)
        out = asked.new_empty((*asked.shape[:2], self._mla.kv_rank))
        lse = asked.new_empty(asked.shape[:2], dtype=torch.float32)
        for span in meta.spans:
            for i, position in enumerate(span.positions().tolist(), span.first):
                rows = self._rows(layer, span, position)
                scores = asked[i].float() @ rows.T * self._scoring.scale  # (H, S)
                lse[i] = torch.logsumexp(scores, dim=-1)
                mixed = torch.softmax(scores, dim=-1) @ rows[:, : self._mla.kv_rank]
                out[i] = mixed.to(asked.dtype)
        return out, lse

    def answered(self, layer: int, part: Tensor) -> Tensor:
        """As `MLAAttention.answered`."""
        if not self._own_heads:
            return part
        values = self._heads(layer)[:, self._mla.nope_dim :]  # (H, E, C)
        return torch.einsum("nhc,hec->nhe", part.float(), values)

    def _heads(self, layer: int) -> Tensor:
        """What makes keys and values of each head, (H, nope + E, C), fp32."""
        return self._up[layer].float().view(-1, self._mla.up_dim, self._mla.kv_rank)

    def _rows(self, layer: int, span: RowSpan, position: int) -> Tensor:
        """Rows 0 ... position of a request, fp32."""
        pages = span.pages(0, position // self._buffer.page_size + 1)
        index = torch.from_numpy(self._buffer.object_index(pages)).to(self._buffer.data.device)
        rows = self._ops.gather_kv(self._buffer, layer, index)
        return rows[0, 0, : position + 1].float()

    def _attend(self, layer: int, q: Tensor, span: RowSpan, position: int) -> tuple[Tensor, Tensor]:
        """One query (H, D) over rows 0 ... position of its request: (H, E), log-sum-exp (H,)."""
        mla, rows = self._mla, self._rows(layer, span, position)
        latents, rotary = rows[:, : mla.kv_rank], rows[:, mla.kv_rank :]
        up = self._heads(layer)
        out = q.new_empty((q.shape[0], mla.v_dim))
        lse = q.new_empty(q.shape[:1], dtype=torch.float32)
        for head, query in enumerate(q.float()):
            both = latents @ up[head].T  # (S, nope + E)
            k = torch.cat((both[:, : mla.nope_dim], rotary), dim=-1)
            scores = k @ query * self._scoring.scale
            lse[head] = torch.logsumexp(scores, dim=0)
            weights = torch.softmax(scores, dim=0)
            out[head] = (weights @ both[:, mla.nope_dim :]).to(q.dtype)
        return out, lse
