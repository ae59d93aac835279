"""Attention that gathers a row's pages into one tensor and calls a fused kernel on it.

What is cut into parts by keys is merged exactly by log-sum-exp; no matrix of tokens by tokens
exists. Nothing reads a slot that holds no token of the row, or none that it may see: exact slices
where a row stands alone, zeros written over the rest of its pages where rows are padded together.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Result:
    """What is computed of all queries: `out` (N, H, D), and `lse` (N, H) if it is wanted."""

    out: Tensor
    sinks: Tensor | None
    lse: Tensor | None

    @classmethod
    def like(cls, q: Tensor, sinks: Tensor | None, lse: Tensor | None = None) -> _Result:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        return cls(out, sinks, lse)

    def put(self, first: int, part: Tensor, lse: Tensor) -> None:
        """Store queries (K, rep, L, D), of which `first` is the first one."""
        kv_heads, rep, count, dim = part.shape
        if self.sinks is not None:
            part = add_sinks(part, lse, self.sinks.view(kv_heads, rep, 1))
        rows = slice(first, first + count)
        self.out[rows].view(count, kv_heads, rep, dim).copy_(part.permute(2, 0, 1, 3))
        if self.lse is not None:
            self.lse[rows].view(count, kv_heads, rep).copy_(lse.permute(2, 0, 1))

    def put_rows(self, rows: Tensor, part: Tensor, lse: Tensor) -> None:
        """Store queries (B, K, rep, D) at `rows`."""
        batch, kv_heads, _, dim = part.shape
        if self.sinks is not None:
            part = add_sinks(part, lse, self.sinks.view(kv_heads, -1))
        self.out.index_copy_(0, rows, part.reshape(batch, -1, dim))
        if self.lse is not None:
            self.lse.index_copy_(0, rows, lse.reshape(batch, -1))


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
        self._planner, self._window = Planner(buffer, window), window

    @property
    def window(self) -> int | None:
        return self._window

    def plan(self, batch: RaggedBatch) -> GatherPlan:
        """Raises nothing; `batch` comes from the step plan and is trusted."""
        return self._planner.plan(batch)

    def write(self, layer: int, k: Tensor, v: Tensor, meta: GatherPlan) -> None:
        if meta.written is not None:
            k, v = k.index_select(0, meta.written), v.index_select(0, meta.written)
        self._ops.write_kv(self._buffer, layer, k, v, meta.write_index)

    def plan_write(self, batch: RaggedBatch) -> GatherPlan:
        return self._planner.plan_write(batch)

    def over(self, buffer: KVBuffer, layer: int) -> GatherAttention:  # noqa: ARG002 - all alike
        return GatherAttention(buffer, self._ops, scoring=self._scoring, window=self._window)

    def attend(
        self, layer: int, q: Tensor, meta: GatherPlan, *, sinks: Tensor | None = None
    ) -> Tensor:
        return self._attend(layer, q, meta, _Result.like(q, sinks)).out.flatten(1)

    def partial(self, layer: int, q: Tensor, meta: GatherPlan) -> tuple[Tensor, Tensor]:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        return self._attend(layer, q, meta, _Result.like(q, None, lse)).out, lse

    def _attend(self, layer: int, q: Tensor, meta: GatherPlan, result: _Result) -> _Result:
        for chunk in meta.chunks:
            queries = q[chunk.first : chunk.first + chunk.count]
            self._run_chunk(layer, queries, chunk, result)
        for banded in meta.banded:
            queries = q[banded.first : banded.first + banded.count]
            self._run_banded(layer, queries, banded, result)
        for decode in meta.decodes:
            self._run_decode(layer, q, decode, result)
        return result

    # A row's K and V are (K, S, D); heads of a group share them, so they are viewed as
    # (K, rep, S, D) without a copy, K as the batch: q of a chunk is (K, rep, L, D).

    def _run_chunk(self, layer: int, q: Tensor, chunk: Chunk, result: _Result) -> None:
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
        result.put(chunk.first, part, lse)

    def _run_banded(self, layer: int, q: Tensor, chunk: BandedChunk, result: _Result) -> None:
        queries = self._by_group(q)
        kv = self._gather(layer, chunk.block, queries.shape[1])
        for band in chunk.bands:
            part, lse = self._attend_band(queries, kv, band)
            result.put(chunk.first + band.low, part, lse)

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
        heads, kv_heads = q.shape[1], self._buffer.num_kv_heads
        return q.view(q.shape[0], kv_heads, heads // kv_heads, q.shape[2]).permute(1, 2, 0, 3)

    def _gather(self, layer: int, block: Block, rep: int) -> Tensor:
        """K and V of a run of tokens, (2, K, rep, S, D)."""
        kv = self._ops.gather_kv(self._buffer, layer, block.index)[
            :, :, None, block.low : block.high
        ]
        return kv.expand(-1, -1, rep, -1, -1)

    def _run_decode(self, layer: int, q: Tensor, decode: DecodeBatch, result: _Result) -> None:
        batch, kv_heads, dim = decode.rows.shape[0], self._buffer.num_kv_heads, q.shape[-1]
        kv = self._ops.gather_kv(self._buffer, layer, decode.index)
        if decode.stale is not None:
            kv.view(-1, dim).index_fill_(0, decode.stale, 0.0)
        kv = kv.view(2, kv_heads, batch, -1, dim)[:, :, :, decode.low : decode.high]
        kv = kv.transpose(1, 2)
        # The heads of a group are the queries of one "head": (B, K, rep, D).
        queries = q.index_select(0, decode.rows).view(batch, kv_heads, -1, dim)
        part, lse = self._ops.attend(queries, kv[0], kv[1], self._scoring, mask=decode.mask)
        result.put_rows(decode.rows, part, lse)
