"""Latent attention by the native CPU kernels: rows are read in place, from pages of any dtype.

The two ways of `attention/mla.py`. Absorbed rows of a step, all decodes among them, are one call:
rows are unpacked once for all heads. A chunk with many queries is expanded, row by row of the
batch: K and V of every head are made of a run of keys at a time, and are the one page that the
ordinary kernels then read.

Letters: N tokens, H heads, D a query's head dim (nope + rope), C the latent, R the rotary part, E a
value's head dim, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.attention.backend import AttentionBackend
from phloem.attention.batch import RaggedBatch, RowSpan
from phloem.attention.mla import Way
from phloem.attention.native import native_batch
from phloem.config.mla import MLAConfig
from phloem.kernels import KVBuffer, Scoring, merge_partials
from phloem.kernels.native import NativeBatch, kv_layer
from phloem.kernels.native_abi import KvLayer
from phloem.kernels.native_latent import NativeLatentKernels
from phloem.kernels.native_types import PackedUp

__all__ = ["LatentPlan", "NativeLatentAttention", "cheaper_way"]

# K and V of all heads that exist at once; a longer context is expanded run by run.
EXPANDED_BYTES = 32 << 20
LEAST_RUN_TOKENS = 64

_Ints = npt.NDArray[np.int64]


def cheaper_way(mla: MLAConfig, *, queries: int, keys: int, pairs: int) -> Way:
    """The way with fewer multiplications for so many queries, keys, and pairs of both."""
    turn = mla.kv_rank * mla.up_dim  # of one query, or of one key
    absorbed = queries * turn + pairs * (mla.row_dim + mla.kv_rank)
    expanded = keys * turn + pairs * (mla.nope_dim + mla.rope_dim + mla.v_dim)
    return Way.ABSORBED if absorbed <= expanded else Way.EXPANDED


@dataclass(frozen=True, slots=True, eq=False)
class LatentPlan:
    """`whole`: all tokens; of them those are written that are `kept` (N,) uint8 (None: all).

    Rows that are absorbed are `absorbed`, the tokens `index` of the batch (None: all); the others
    are `expanded`, each on its own.
    """

    whole: NativeBatch
    kept: Tensor | None
    absorbed: NativeBatch | None
    index: Tensor | None
    expanded: tuple[RowSpan, ...]


class NativeLatentAttention(AttentionBackend[LatentPlan]):
    """Ragged prefill chunks and decodes over the rows of `buffer`, which has one side.

    `up[l]`: of layer l. `way`: None for the cheaper one of each row of a batch. `own_heads` as
    `MLAAttention` has it.
    """

    def __init__(
        self,
        buffer: KVBuffer,
        kernels: NativeLatentKernels,
        *,
        mla: MLAConfig,
        up: Sequence[PackedUp],
        scoring: Scoring,
        way: Way | None = None,
        own_heads: bool = False,
    ) -> None:
        self._buffer, self._kernels = buffer, kernels  # kv_layer only borrows the buffer
        self._mla, self._up, self._scoring, self._way = mla, tuple(up), scoring, way
        self._own_heads = own_heads
        self._layers = tuple(
            kv_layer(buffer, i, rope_dim=mla.rope_dim) for i in range(buffer.num_layers)
        )

    @property
    def window(self) -> None:
        return None

    def plan(self, batch: RaggedBatch) -> LatentPlan:
        whole, kept = native_batch(batch), _kept(batch)
        self._kernels.check_batch(self._layers[0], whole, 1 << 30)
        expanded = tuple(span for span in batch.spans if self._is_expanded(span))
        if not expanded:
            return LatentPlan(whole, kept, whole, None, ())
        spans = [span for span in batch.spans if not self._is_expanded(span)]
        if not spans:
            return LatentPlan(whole, kept, None, None, expanded)
        index = np.concatenate([np.arange(s.first, s.first + s.count) for s in spans])
        firsts = np.cumsum([0, *(s.count for s in spans)]).tolist()
        moved = tuple(replace(s, first=f) for s, f in zip(spans, firsts[:-1], strict=True))
        absorbed = native_batch(RaggedBatch(moved, batch.page_size))
        return LatentPlan(whole, kept, absorbed, torch.from_numpy(index), expanded)

    def plan_write(self, batch: RaggedBatch) -> LatentPlan:
        return LatentPlan(native_batch(batch), _kept(batch), None, None, ())

    def over(self, buffer: KVBuffer, layer: int) -> NativeLatentAttention:
        return NativeLatentAttention(
            buffer,
            self._kernels,
            mla=self._mla,
            up=self._up[layer : layer + 1],
            scoring=self._scoring,
            way=self._way,
            own_heads=self._own_heads,
        )

    def write(self, layer: int, k: Tensor, v: Tensor, meta: LatentPlan) -> None:
        """Rows k (N, 1, C + R), of which v is a part; where every rank writes what it computes."""
        assert meta.kept is None, "a row of ranks writes by `latent_write`"
        self._kernels.rope_kv_write(None, (k, v), self._layers[layer], meta.whole)

    def attend(
        self, layer: int, q: Tensor, meta: LatentPlan, *, sinks: Tensor | None = None
    ) -> Tensor:
        """q (N, H, D): (N, H * E)."""
        assert sinks is None, "latent attention has no sinks"
        return self.partial(layer, q, meta)[0].flatten(1)

    def partial(self, layer: int, q: Tensor, meta: LatentPlan) -> tuple[Tensor, Tensor]:
        """q (N, H, D): (N, H, E), and the log-sum-exp (N, H)."""
        queries = q.float()
        out = queries.new_empty((*q.shape[:2], self._mla.v_dim))
        lse = queries.new_empty(q.shape[:2])
        if meta.absorbed is not None and meta.index is None:
            self._absorbed(layer, queries, meta.absorbed, out, lse)
        elif meta.absorbed is not None and meta.index is not None:
            some = queries.index_select(0, meta.index)
            part = out.new_empty((len(some), *out.shape[1:]))
            part_lse = lse.new_empty(some.shape[:2])
            self._absorbed(layer, some, meta.absorbed, part, part_lse)
            out.index_copy_(0, meta.index, part)
            lse.index_copy_(0, meta.index, part_lse)
        for span in meta.expanded:
            at = slice(span.first, span.first + span.count)
            self._expanded(layer, queries[at], span, out[at], lse[at])
        return out.to(q.dtype), lse

    def ask(self, layer: int, q: Tensor) -> Tensor:
        return self._absorb(layer, q.float()).to(q.dtype) if self._own_heads else q

    def partial_asked(self, layer: int, asked: Tensor, meta: LatentPlan) -> tuple[Tensor, Tensor]:
        """With `own_heads` asked (n, H, C + R): (n, H, C), and the log-sum-exp."""
        if not self._own_heads:
            return self.partial(layer, asked, meta)
        lse = torch.empty(asked.shape[:2])
        return self._mixtures(layer, asked.float(), meta.whole, lse).to(asked.dtype), lse

    def answered(self, layer: int, part: Tensor) -> Tensor:
        if not self._own_heads:
            return part
        out = torch.empty((*part.shape[:2], self._mla.v_dim))
        self._kernels.heads_linear(part.float(), self._up[layer].values, out)
        return out

    def _is_expanded(self, span: RowSpan) -> bool:
        if self._way is not None:
            return self._way is Way.EXPANDED
        if span.count == 1:
            return False  # all decodes are one call
        keys = span.end - span.read_from
        pairs = int((span.positions() + 1 - span.read_from).sum())
        way = cheaper_way(self._mla, queries=span.count, keys=keys, pairs=pairs)
        return way is Way.EXPANDED

    def _absorb(self, layer: int, q: Tensor) -> Tensor:
        """Queries (N, H, D) in the space of rows, (N, H, C + R)."""
        mla = self._mla
        absorbed = q.new_empty((*q.shape[:2], mla.row_dim))
        into = absorbed[..., : mla.kv_rank]
        self._kernels.heads_linear(q[..., : mla.nope_dim], self._up[layer].absorb, into)
        absorbed[..., mla.kv_rank :] = q[..., mla.nope_dim :]
        return absorbed

    def _mixtures(self, layer: int, absorbed: Tensor, batch: NativeBatch, lse: Tensor) -> Tensor:
        """What absorbed queries get of latents, (N, H, C)."""
        return self._kernels.attention(
            absorbed, self._layers[layer], batch, lse=lse, scoring=self._scoring
        )

    def _absorbed(
        self, layer: int, q: Tensor, batch: NativeBatch, out: Tensor, lse: Tensor
    ) -> None:
        mixed = self._mixtures(layer, self._absorb(layer, q), batch, lse)
        self._kernels.heads_linear(mixed, self._up[layer].values, out)

    def _expanded(self, layer: int, q: Tensor, span: RowSpan, out: Tensor, lse: Tensor) -> None:
        """Attention of one row's queries, run by run of its keys, merged by log-sum-exp."""
        positions, first_run = span.positions(), True
        for low, high in self._runs(span, q.shape[1]):
            begin = int(np.searchsorted(positions, low))  # who sees a key of the run
            kv, batch = self._run(layer, span, low, high, positions[begin:])
            part_lse = lse.new_empty((len(positions) - begin, q.shape[1]))
            part = self._kernels.attention(
                q[begin:], kv.layer, batch, lse=part_lse, scoring=self._scoring
            )
            if not first_run:
                part, part_lse = merge_partials(out[begin:], lse[begin:], part, part_lse)
            out[begin:], lse[begin:], first_run = part, part_lse, False

    def _runs(self, span: RowSpan, heads: int) -> Iterator[tuple[int, int]]:
        mla = self._mla
        token_bytes = heads * (mla.nope_dim + mla.rope_dim + mla.v_dim) * 4
        step = max(LEAST_RUN_TOKENS, EXPANDED_BYTES // token_bytes)
        for low in range(span.read_from, span.end, step):
            yield low, min(low + step, span.end)

    def _run(
        self, layer: int, span: RowSpan, low: int, high: int, positions: _Ints
    ) -> tuple[_Expanded, NativeBatch]:
        """Keys low ... high - 1 expanded, and queries at `positions` as if these were all."""
        kv = self._expand(layer, self._rows(layer, span, low, high))
        seen = np.minimum(positions, high - 1) - low
        starts = np.array([0, len(positions)], dtype=np.int32)
        return kv, NativeBatch(starts, seen.astype(np.int32), np.zeros((1, 1), dtype=np.int64))

    def _rows(self, layer: int, span: RowSpan, low: int, high: int) -> Tensor:
        """Rows of positions low ... high - 1 of a request, fp32 (S, C + R)."""
        size = self._buffer.page_size
        slots = torch.from_numpy(span.pages(low // size, (high - 1) // size + 1))
        stored = self._buffer.layer(layer).index_select(0, slots)  # (P, 1, 1, T, 1, items)
        first = low // size * size
        tokens = stored.view(-1, stored.shape[-1])[low - first : high - first]
        return self._buffer.decode(tokens).float()

    def _expand(self, layer: int, rows: Tensor) -> _Expanded:
        """K and V of every head of rows (S, C + R), side by side: one page of S tokens."""
        mla, up = self._mla, self._up[layer]
        heads, dim = up.keys.num_heads, mla.nope_dim + mla.rope_dim
        data = rows.new_empty((len(rows), heads, dim + mla.v_dim))
        latents = rows[:, : mla.kv_rank]
        self._kernels.heads_linear(latents, up.keys, data[..., : mla.nope_dim])
        data[..., mla.nope_dim : dim] = rows[:, None, mla.kv_rank :]
        self._kernels.heads_linear(latents, up.values, data[..., dim:])
        return _Expanded(data, dim)


def _kept(batch: RaggedBatch) -> Tensor | None:
    """Which tokens are written here at all; None: all."""
    if batch.kept is None:
        return None
    kept = np.zeros(batch.num_tokens, dtype=np.uint8)
    kept[batch.kept] = 1
    return torch.from_numpy(kept)


class _Expanded:
    """K (D numbers) and V beside each other: `data` (S, H, D + E). Owns it."""

    def __init__(self, data: Tensor, dim: int) -> None:
        self._data = data
        tokens, heads, width = data.shape
        self.layer = KvLayer(
            base=data.data_ptr(),
            page_stride=data.numel(),
            group_stride=data.numel(),
            kv_stride=dim,
            token_stride=heads * width,
            head_stride=width,
            num_pages=1,
            heads_per_group=heads,
            page_size=tokens,
            num_kv_heads=heads,
            head_dim=dim,
            dtype=0,
            value_dim=width - dim,
        )
