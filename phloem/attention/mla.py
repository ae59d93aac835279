"""Latent attention over pages: each token's row is written first, and read back from its page.

Two ways to the same result. Absorbed: a query goes down into the space of latents, attends to rows
as they are, and its result comes up again; rows are never expanded, so it is what decodes do.
Expanded: K and V of every head are made of the rows. With many queries of a row that is less work,
since products are taken over head_dim numbers instead of kv_rank. A chunk takes, part by part,
whichever needs fewer multiplications.

Letters: N tokens, H heads, D a query's head dim (nope + rope), C the latent, R the rotary part, E a
value's head dim, S keys.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phloem.attention.backend import AttentionBackend
from phloem.attention.batch import RaggedBatch
from phloem.attention.gather_plan import Block, Chunk, DecodeBatch, GatherPlan, Planner
from phloem.config.mla import MLAConfig
from phloem.kernels import KVBuffer, Ops, Scoring, merge_partials

__all__ = ["MLAAttention", "Way", "cheaper_way"]

# K and V of all heads that exist at once; a longer part is expanded run by run.
EXPANDED_BYTES = 128 << 20
LEAST_RUN_TOKENS = 64


class Way(enum.Enum):
    """How a part of a chunk is computed."""

    ABSORBED = "absorbed"
    EXPANDED = "expanded"


def cheaper_way(mla: MLAConfig, *, queries: int, keys: int, pairs: int) -> Way:
    """The way with fewer multiplications for so many queries, keys and pairs that see each other.

    Rows serve as values whole where they are absorbed, and values are padded where they are not:
    kernels want keys and values of one size.
    """
    turn = mla.kv_rank * mla.up_dim  # of one query, or of one key
    absorbed = queries * turn + pairs * 2 * mla.row_dim
    expanded = keys * turn + pairs * 2 * max(mla.nope_dim + mla.rope_dim, mla.v_dim)
    return Way.ABSORBED if absorbed <= expanded else Way.EXPANDED


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries low ... high - 1 of a chunk; `causal`: the run of keys is theirs, key by key."""

    low: int
    high: int
    causal: bool


class MLAAttention(AttentionBackend[GatherPlan]):
    """Ragged prefill chunks and decodes over the rows of `buffer`, which has one side.

    `up[l]` (H * (nope + E), C) makes keys and values of layer l of its latents. `way`: None for the
    cheaper one of each part. `own_heads`: other ranks have other heads, so what they are asked with
    is absorbed queries, and what they answer are mixtures of latents.
    """

    def __init__(
        self,
        buffer: KVBuffer,
        ops: Ops,
        *,
        mla: MLAConfig,
        up: Sequence[Tensor],
        scoring: Scoring,
        way: Way | None = None,
        own_heads: bool = False,
    ) -> None:
        self._buffer, self._ops, self._mla, self._scoring = buffer, ops, mla, scoring
        self._up, self._way, self._own_heads = tuple(up), way, own_heads
        self._planner = Planner(buffer, None)

    @property
    def window(self) -> None:
        return None

    def plan(self, batch: RaggedBatch) -> GatherPlan:
        """Raises nothing; `batch` comes from the step plan and is trusted."""
        return self._planner.plan(batch)

    def write(self, layer: int, k: Tensor, v: Tensor, meta: GatherPlan) -> None:
        """Rows k (N, 1, C + R), of which v is a part."""
        if meta.written is not None:
            k, v = k.index_select(0, meta.written), v.index_select(0, meta.written)
        self._ops.write_kv(self._buffer, layer, k, v, meta.write_index)

    def attend(
        self, layer: int, q: Tensor, meta: GatherPlan, *, sinks: Tensor | None = None
    ) -> Tensor:
        """q (N, H, D): (N, H * E)."""
        assert sinks is None, "latent attention has no sinks"
        return self.partial(layer, q, meta)[0].flatten(1)

    def plan_write(self, batch: RaggedBatch) -> GatherPlan:
        return self._planner.plan_write(batch)

    def over(self, buffer: KVBuffer, layer: int) -> MLAAttention:
        return MLAAttention(
            buffer,
            self._ops,
            mla=self._mla,
            up=self._up[layer : layer + 1],
            scoring=self._scoring,
            way=self._way,
            own_heads=self._own_heads,
        )

    def partial(self, layer: int, q: Tensor, meta: GatherPlan) -> tuple[Tensor, Tensor]:
        """q (N, H, D): (N, H, E), and the log-sum-exp (N, H)."""
        return self._partial(layer, q, meta, self._heads(layer))

    def ask(self, layer: int, q: Tensor) -> Tensor:
        return self._absorb(q, self._heads(layer)) if self._own_heads else q

    def partial_asked(self, layer: int, asked: Tensor, meta: GatherPlan) -> tuple[Tensor, Tensor]:
        """With `own_heads` asked (n, H, C + R): (n, H, C), and the log-sum-exp."""
        return self._partial(layer, asked, meta, None if self._own_heads else self._heads(layer))

    def answered(self, layer: int, part: Tensor) -> Tensor:
        up = self._heads(layer)
        return self._values(part.to(up.dtype), up) if self._own_heads else part

    def _heads(self, layer: int) -> Tensor:
        """What makes keys and values of each head, (H, nope + E, C)."""
        return self._up[layer].view(-1, self._mla.up_dim, self._mla.kv_rank)

    def _partial(
        self, layer: int, q: Tensor, meta: GatherPlan, up: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`up` None: q are absorbed queries, and latents are values."""
        width = self._mla.kv_rank if up is None else self._mla.v_dim
        out = q.new_empty((*q.shape[:2], width))
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        for chunk in meta.chunks:
            span = slice(chunk.first, chunk.first + chunk.count)
            part, part_lse = self._run_chunk(layer, q[span], chunk, up)
            out[span].copy_(part.transpose(0, 1))
            lse[span].copy_(part_lse.transpose(0, 1))
        for decode in meta.decodes:
            part, part_lse = self._run_decode(layer, q, decode, up)
            out.index_copy_(0, decode.rows, part)
            lse.index_copy_(0, decode.rows, part_lse)
        return out, lse

    def _run_chunk(
        self, layer: int, q: Tensor, chunk: Chunk, up: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(H, n, E) of queries (n, H, D), part by part, merged by log-sum-exp, and that (H, n)."""
        count, heads = q.shape[:2]
        width = self._mla.kv_rank if up is None else self._mla.v_dim
        total = q.new_empty((heads, count, width))
        lse = q.new_empty((heads, count), dtype=torch.float32)
        absorbed: Tensor | None = None
        begun = 0  # of the queries, the first ones: they have been attended to
        for block in (chunk.own, *chunk.earlier):
            rows = self._gather(layer, block)
            own = block is chunk.own
            pairs = count * len(rows) // (2 if own else 1)
            way = self._way or cheaper_way(self._mla, queries=count, keys=len(rows), pairs=pairs)
            if up is None or way is Way.ABSORBED or (own and chunk.bands):
                absorbed = self._absorb(q, up) if absorbed is None else absorbed
                if own:
                    found = list(self._attend_own(absorbed, rows, up, chunk))
                else:
                    found = [(slice(0, count), *self._attend_absorbed(absorbed, rows, up))]
            else:
                found = list(self._attend_expanded(q, rows, up, own))
            for queries, part, part_lse in found:
                if queries.start == begun:  # the chunk's own tokens come first, in their order
                    begun = queries.stop
                else:
                    part, part_lse = merge_partials(
                        part, part_lse, total[:, queries], lse[:, queries]
                    )
                total[:, queries], lse[:, queries] = part, part_lse
        return total, lse

    def _gather(self, layer: int, block: Block) -> Tensor:
        """The rows of a run of tokens, (S, C + R)."""
        return self._ops.gather_kv(self._buffer, layer, block.index)[0, 0, block.low : block.high]

    def _absorb(self, q: Tensor, up: Tensor | None) -> Tensor:
        """Queries (N, H, D) in the space of rows, (N, H, C + R); without `up` they are there."""
        if up is None:
            return q
        q_nope, q_rope = torch.split(q, [self._mla.nope_dim, self._mla.rope_dim], dim=-1)
        keys = up[:, : self._mla.nope_dim].transpose(1, 2)  # (H, C, nope)
        return torch.cat((self._ops.heads_linear(q_nope, keys), q_rope), dim=-1)

    def _values(self, mixed: Tensor, up: Tensor | None) -> Tensor:
        """Mixtures of rows (N, H, C + R) as mixtures of values, (N, H, E); without `up`: of latents
        (N, H, C)."""
        latents = mixed[..., : self._mla.kv_rank]
        if up is None:
            return latents
        return self._ops.heads_linear(latents, up[:, self._mla.nope_dim :])

    def _attend_own(
        self, absorbed: Tensor, rows: Tensor, up: Tensor | None, chunk: Chunk
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Absorbed queries over the chunk's own tokens, and those of other ranks between them.

        Bands are always absorbed: to expand the same keys for each of them would cost more.
        """
        if not chunk.bands:
            part = self._attend_absorbed(absorbed, rows, up, causal=True)
            yield slice(0, chunk.count), *part
        for band in chunk.bands:
            mine, keys = slice(band.low, band.high), rows[band.key_low : band.key_high]
            masked = self._attend_absorbed(
                absorbed[mine], keys, up, causal=band.mask is None, mask=band.mask
            )
            yield mine, *masked
            if band.clear:
                clear = rows[band.key_low - band.clear : band.key_low]
                yield mine, *self._attend_absorbed(absorbed[mine], clear, up)

    def _attend_absorbed(
        self,
        absorbed: Tensor,
        rows: Tensor,
        up: Tensor | None,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Absorbed queries (n, H, C + R) over rows (S, C + R): (H, n, E), LSE (H, n)."""
        queries = absorbed.transpose(0, 1)[None]
        keys = rows.expand(1, queries.shape[1], -1, -1)  # a view: all heads share them
        mixed, lse = self._ops.attend(queries, keys, keys, self._scoring, causal=causal, mask=mask)
        return self._values(mixed[0].transpose(0, 1), up).transpose(0, 1), lse[0]

    def _attend_expanded(
        self, q: Tensor, rows: Tensor, up: Tensor, causal: bool
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """The same with K and V of each head, run by run of keys: which queries, and theirs."""
        queries = q.transpose(0, 1)[None]
        for low in range(0, len(rows), self._run_tokens(q)):
            high = min(low + self._run_tokens(q), len(rows))
            k, v = self._expand(rows[low:high], up)
            for part in _parts(len(q), low, high, causal):
                mine = queries[:, :, part.low : part.high]
                mixed, lse = self._ops.attend(mine, k, v, self._scoring, causal=part.causal)
                yield slice(part.low, part.high), mixed[0], lse[0]

    def _run_tokens(self, q: Tensor) -> int:
        widest = max(q.shape[2], self._mla.v_dim)
        token_bytes = q.shape[1] * (self._mla.up_dim + 2 * widest) * q.element_size()
        return max(LEAST_RUN_TOKENS, EXPANDED_BYTES // token_bytes)

    def _expand(self, rows: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """K (1, H, S, D) and V (1, H, S, E) of rows (S, C + R)."""
        mla = self._mla
        latents, rotary = torch.split(rows, [mla.kv_rank, mla.rope_dim], dim=-1)
        both = self._ops.linear(latents, up.reshape(-1, mla.kv_rank), None)
        by_head = both.view(len(rows), -1, mla.up_dim)
        nope, v = torch.split(by_head, [mla.nope_dim, mla.v_dim], dim=-1)
        k = torch.cat((nope, rotary[:, None].expand(-1, nope.shape[1], -1)), dim=-1)
        return k.transpose(0, 1)[None], v.transpose(0, 1)[None]

    def _run_decode(
        self, layer: int, q: Tensor, decode: DecodeBatch, up: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(B, H, E) of the batch's queries, and their log-sum-exp (B, H)."""
        batch = decode.rows.shape[0]
        rows = self._ops.gather_kv(self._buffer, layer, decode.index)[0, 0]
        if decode.stale is not None:
            rows.index_fill_(0, decode.stale, 0.0)
        rows = rows.view(batch, 1, -1, rows.shape[-1])[:, :, decode.low : decode.high]
        # The heads are the queries of one "head": (B, 1, H, C + R).
        queries = self._absorb(q.index_select(0, decode.rows), up)[:, None]
        mixed, lse = self._ops.attend(queries, rows, rows, self._scoring, mask=decode.mask)
        return self._values(mixed[:, 0], up), lse[:, 0]


def _parts(count: int, low: int, high: int, causal: bool) -> Iterator[_Part]:
    """Which of `count` queries see keys low ... high - 1: all, or, of their own, the later ones."""
    if not causal:
        yield _Part(0, count, False)
        return
    yield _Part(low, high, True)
    if high < count:
        yield _Part(high, count, False)
