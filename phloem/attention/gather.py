"""Attention that gathers a row's pages into one tensor and calls a fused kernel on it.

What is cut into parts by keys is merged exactly by log-sum-exp; no matrix of tokens by tokens
exists. Nothing reads a slot that holds no token of the row, or none that it may see: exact slices
where a row stands alone, zeros written over the rest of its pages where rows are padded together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phloem.attention.backend import AttentionBackend
from phloem.attention.batch import RaggedBatch
from phloem.attention.gather_plan import (
    Band,
    BandedChunk,
    Block,
    Chunk,
    DecodeBatch,
    GatherPlan,
    Planner,
)
from phloem.kernels import KVBuffer, Ops, Scoring, add_sinks, merge_partials

__all__ = ["GatherAttention"]


class GatherAttention(AttentionBackend[GatherPlan]):
    """Ragged prefill chunks and decodes over the pages of `buffer`, of dtype `dtype`.

    `scoring` None: products divided by the root of the head dimension.
    """

    def __init__(
        self,
        buffer: KVBuffer,
        ops: Ops,
        *,
        scoring: Scoring | None = None,
        window: int | None = None,
    ) -> None:
        self._buffer, self._ops = buffer, ops
        self._scoring = scoring or Scoring(buffer.head_dim**-0.5)
        self._planner = Planner(buffer, window)

    def plan(self, batch: RaggedBatch) -> GatherPlan:
        """Raises nothing; `batch` comes from the step plan and is trusted."""
        return self._planner.plan(batch)

    def write(self, layer: int, k: Tensor, v: Tensor, meta: GatherPlan) -> None:
        if meta.written is not None:
            k, v = k.index_select(0, meta.written), v.index_select(0, meta.written)
        self._ops.write_kv(self._buffer, layer, k, v, meta.write_index)

    def attend(
        self, layer: int, q: Tensor, meta: GatherPlan, *, sinks: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for chunk in meta.chunks:
            span = slice(chunk.first, chunk.first + chunk.count)
            self._run_chunk(layer, q[span], out[span], chunk, sinks)
        for banded in meta.banded:
            span = slice(banded.first, banded.first + banded.count)
            self._run_banded(layer, q[span], out[span], banded, sinks)
        for decode in meta.decodes:
            self._run_decode(layer, q, out, decode, sinks)
        return out.flatten(1)

    # A row's K and V are (K, S, D); heads of a group share them, so they are viewed as
    # (K, rep, S, D) without a copy, K as the batch: q of a chunk is (K, rep, L, D).

    def _run_chunk(
        self, layer: int, q: Tensor, out: Tensor, chunk: Chunk, sinks: Tensor | None
    ) -> None:
        queries = self._by_group(q)
        kv = self._gather(layer, chunk.own, queries.shape[1])
        if chunk.bands:
            parts = [self._attend_band(queries, kv, band) for band in chunk.bands]
            part, lse = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
        else:
            part, lse = self._ops.attend(queries, kv[0], kv[1], self._scoring, causal=True)
        for block in chunk.earlier:
            kv = self._gather(layer, block, queries.shape[1])
            other, other_lse = self._ops.attend(queries, kv[0], kv[1], self._scoring)
            part, lse = merge_partials(part, lse, other, other_lse)
        self._put(out, part, lse, sinks)

    def _run_banded(
        self, layer: int, q: Tensor, out: Tensor, chunk: BandedChunk, sinks: Tensor | None
    ) -> None:
        queries = self._by_group(q)
        kv = self._gather(layer, chunk.block, queries.shape[1])
        for band in chunk.bands:
            part, lse = self._attend_band(queries, kv, band)
            self._put(out[band.low : band.high], part, lse, sinks)

    def _attend_band(self, queries: Tensor, kv: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        """The band's queries over its keys in kv (2, K, rep, S, D)."""
        q, causal = queries[:, :, band.low : band.high], band.mask is None
        keys = kv[:, :, :, band.key_low : band.key_high]
        part, lse = self._ops.attend(
            q, keys[0], keys[1], self._scoring, causal=causal, mask=band.mask
        )
        if band.clear:
            keys = kv[:, :, :, band.key_low - band.clear : band.key_low]
            other, other_lse = self._ops.attend(q, keys[0], keys[1], self._scoring)
            part, lse = merge_partials(part, lse, other, other_lse)
        return part, lse

    def _by_group(self, q: Tensor) -> Tensor:
        count, heads, dim = q.shape
        kv_heads = self._buffer.num_kv_heads
        return q.view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)

    def _gather(self, layer: int, block: Block, rep: int) -> Tensor:
        """K and V of a run of tokens, (2, K, rep, S, D)."""
        kv = self._ops.gather_kv(self._buffer, layer, block.index)[
            :, :, None, block.low : block.high
        ]
        return kv.expand(-1, -1, rep, -1, -1)

    def _put(self, out: Tensor, part: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
        """Store queries (K, rep, L, D) in out (L, H, D)."""
        kv_heads, rep, count, dim = part.shape
        if sinks is not None:
            part = add_sinks(part, lse, sinks.view(kv_heads, rep, 1))
        out.view(count, kv_heads, rep, dim).copy_(part.permute(2, 0, 1, 3))

    def _run_decode(
        self, layer: int, q: Tensor, out: Tensor, decode: DecodeBatch, sinks: Tensor | None
    ) -> None:
        batch, kv_heads, dim = decode.rows.shape[0], self._buffer.num_kv_heads, q.shape[-1]
        kv = self._ops.gather_kv(self._buffer, layer, decode.index)
        if decode.stale is not None:
            kv.view(-1, dim).index_fill_(0, decode.stale, 0.0)
        kv = kv.view(2, kv_heads, batch, -1, dim)[:, :, :, decode.low : decode.high]
        kv = kv.transpose(1, 2)
        # The heads of a group are the queries of one "head": (B, K, rep, D).
        queries = q.index_select(0, decode.rows).view(batch, kv_heads, -1, dim)
        part, lse = self._ops.attend(queries, kv[0], kv[1], self._scoring, mask=decode.mask)
        if sinks is not None:
            part = add_sinks(part, lse, sinks.view(kv_heads, -1))
        out.index_copy_(0, decode.rows, part.reshape(batch, -1, dim))
