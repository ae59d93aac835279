"""Attention that gathers a row's pages into one tensor and calls a fused kernel on it.

A chunk of a prefill is one row at a time: its own tokens causally, what came before them in blocks
of bounded size, merged exactly by log-sum-exp, so no matrix of tokens by tokens exists. Rows with
one new token are padded into a few batches of similar length.

Nothing reads a slot that holds no token of the row: exact slices where a row stands alone, zeros
written over the unused end of the last page where rows are padded together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.attention.batch import RaggedBatch, RowSpan
from phloem.kernels import KVBuffer, Ops, merge_partials

__all__ = ["GatherAttention", "GatherPlan"]

CONTEXT_BLOCK_TOKENS = 8192
DECODE_BATCH_BYTES = 32 << 20
# A decode batch may hold rows up to this much longer than its shortest one (then padding is cheap).
PAD_RATIO = 1.25


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A block of earlier tokens: its pages (2, G, n), and where its tokens lie in the gather."""

    index: Tensor
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One row with several new tokens. The last of `blocks` holds the chunk itself."""

    first: int
    count: int
    own: _Prefix
    earlier: tuple[_Prefix, ...]


@dataclass(frozen=True, slots=True)
class _DecodeBatch:
    """Rows with one new token each, padded to the longest.

    `rows` (B,) in the flat batch; `index` (2, G, B, n). Where lengths differ: `mask` (B, 1, 1, S)
    additive and `stale`, the rows of the gather, seen as (2 * K * B * S, D), to zero.
    """

    rows: Tensor
    index: Tensor
    length: int
    mask: Tensor | None
    stale: Tensor | None


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Index tensors of one step, on the device."""

    write_index: Tensor
    chunks: tuple[_Chunk, ...]
    decodes: tuple[_DecodeBatch, ...]


class GatherAttention:
    """Ragged prefill chunks and decodes over the pages of `buffer`, of dtype `dtype`."""

    def __init__(self, buffer: KVBuffer, ops: Ops) -> None:
        self._buffer = buffer
        self._ops = ops
        self._device = buffer.data.device

    def plan(self, batch: RaggedBatch) -> GatherPlan:
        """Raises nothing; `batch` comes from the step plan and is trusted."""
        offsets = batch.positions() % batch.page_size
        write_index = self._buffer.token_index(batch.token_slots(), offsets)
        chunks = tuple(self._plan_chunk(s) for s in batch.spans if s.count > 1)
        singles = sorted((s for s in batch.spans if s.count == 1), key=lambda s: s.end)
        decodes = tuple(self._plan_decode(group) for group in self._group(singles))
        return GatherPlan(self._to_device(write_index), chunks, decodes)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, meta: GatherPlan) -> Tensor:
        self._ops.write_kv(self._buffer, layer, k, v, meta.write_index)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for chunk in meta.chunks:
            span = slice(chunk.first, chunk.first + chunk.count)
            self._run_chunk(layer, q[span], out[span], chunk)
        for decode in meta.decodes:
            self._run_decode(layer, q, out, decode)
        return out.view(q.shape[0], -1)

    # A row's K and V are (K, S, D); heads of a group share them, so they are viewed as
    # (K, rep, S, D) without a copy, K as the batch: q of a chunk is (K, rep, L, D).

    def _run_chunk(self, layer: int, q: Tensor, out: Tensor, chunk: _Chunk) -> None:
        count, heads, dim = q.shape
        kv_heads = self._buffer.num_kv_heads
        queries = q.view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        part, lse = self._attend(layer, queries, chunk.own, causal=True)
        for block in chunk.earlier:
            other, other_lse = self._attend(layer, queries, block, causal=False)
            part, lse = merge_partials(part, lse, other, other_lse)
        out.view(count, kv_heads, heads // kv_heads, dim).copy_(part.permute(2, 0, 1, 3))

    def _attend(
        self, layer: int, queries: Tensor, block: _Prefix, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        kv = self._ops.gather_kv(self._buffer, layer, block.index)[
            :, :, None, block.low : block.high
        ]
        kv = kv.expand(-1, -1, queries.shape[1], -1, -1)
        return self._ops.attend(queries, kv[0], kv[1], causal=causal)

    def _run_decode(self, layer: int, q: Tensor, out: Tensor, decode: _DecodeBatch) -> None:
        batch, kv_heads, dim = decode.rows.shape[0], self._buffer.num_kv_heads, q.shape[-1]
        kv = self._ops.gather_kv(self._buffer, layer, decode.index)
        if decode.stale is not None:
            kv.view(-1, dim).index_fill_(0, decode.stale, 0.0)
        kv = kv.view(2, kv_heads, batch, -1, dim)[:, :, :, : decode.length].transpose(1, 2)
        # The heads of a group are the queries of one "head": (B, K, rep, D).
        queries = q.index_select(0, decode.rows).view(batch, kv_heads, -1, dim)
        if decode.mask is None:
            part, _ = self._ops.attend(queries, kv[0], kv[1], causal=False)
        else:
            part = self._ops.attend_masked(queries, kv[0], kv[1], decode.mask)
        out.index_copy_(0, decode.rows, part.reshape(batch, -1, dim))

    def _plan_chunk(self, span: RowSpan) -> _Chunk:
        step = max(CONTEXT_BLOCK_TOKENS, self._buffer.page_size)
        borders = range(0, span.start, step)
        earlier = tuple(self._plan_block(span, low, min(low + step, span.start)) for low in borders)
        own = self._plan_block(span, span.start, span.end)
        return _Chunk(span.first, span.count, own, earlier)

    def _plan_block(self, span: RowSpan, low: int, high: int) -> _Prefix:
        size = self._buffer.page_size
        first = low // size
        slots = span.slots[first : -(-high // size)]
        index = self._to_device(self._buffer.object_index(slots))
        return _Prefix(index, low - first * size, high - first * size)

    def _group(self, spans: list[RowSpan]) -> list[list[RowSpan]]:
        """Cut rows, sorted by length, where padding or memory would grow too large."""
        data = self._buffer.data
        token_bytes = 2 * self._buffer.num_kv_heads * self._buffer.head_dim * data.element_size()
        groups: list[list[RowSpan]] = []
        for span in spans:
            group = groups[-1] if groups else []
            limit = PAD_RATIO * group[0].end + 4 * self._buffer.page_size if group else 0
            too_big = (len(group) + 1) * span.end * token_bytes > DECODE_BATCH_BYTES
            if group and span.end <= limit and not too_big:
                group.append(span)
            else:
                groups.append([span])
        return groups

    def _plan_decode(self, group: list[RowSpan]) -> _DecodeBatch:
        size = self._buffer.page_size
        ends = np.array([span.end for span in group], dtype=np.int64)
        pages = -(-ends // size)
        most = int(pages[-1])
        slots = np.full((len(group), most), self._buffer.zero_slot, dtype=np.int64)
        for i, span in enumerate(group):
            slots[i, : pages[i]] = span.slots[: pages[i]]
        rows = np.array([span.first for span in group], dtype=np.int64)
        longest = int(ends[-1])
        mask = stale = None
        if int(ends[0]) != longest:
            unused = np.arange(most * size) >= ends[:, None]  # (B, S)
            within = unused & (np.arange(most * size) < (pages * size)[:, None])
            stale = self._to_device(self._stale_rows(within))
            mask = torch.zeros((len(group), 1, 1, longest), dtype=self._buffer.data.dtype)
            mask.masked_fill_(torch.from_numpy(unused[:, None, None, :longest]), -torch.inf)
            mask = mask.to(self._device)
        return _DecodeBatch(
            rows=self._to_device(rows),
            index=self._to_device(self._buffer.object_index(slots)),
            length=longest,
            mask=mask,
            stale=stale,
        )

    def _stale_rows(self, within: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Rows of (2 * K, B * S) where `within` (B, S) is true, for every K and V head."""
        tokens = np.flatnonzero(within)
        heads = np.arange(2 * self._buffer.num_kv_heads, dtype=np.int64) * within.size
        return np.ascontiguousarray((heads[:, None] + tokens).reshape(-1))

    def _to_device(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
