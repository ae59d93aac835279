"""Which pages a step gathers, and what of them each query sees: index tensors, made once per step.

A chunk of a prefill is one row. Without a window it is cut by keys: its own tokens causally, what
came before them in blocks of bounded size. With a window it is cut by queries: a band of queries
reads one run of keys, so a chunk costs tokens * window, whatever lies before it.

    keys      |---- window - 1 ----|-- band --|
    queries                        |-- band --|

Rows with one new token are padded into a few batches of similar length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.attention.bands import Band, StripedBands
from phloem.attention.batch import RaggedBatch, RowSpan
from phloem.kernels import KVBuffer

__all__ = ["Band", "BandedChunk", "Block", "Chunk", "DecodeBatch", "GatherPlan", "Planner"]

CONTEXT_BLOCK_TOKENS = 8192
DECODE_BATCH_BYTES = 32 << 20
# A decode batch may hold rows up to this much longer than its shortest one (then padding is cheap).
PAD_RATIO = 1.25
# Queries of a band: as many as the window has tokens wastes half of the products, fewer waste less;
# below 64 the calls cost more than the products, above 256 masks grow for nothing.
MIN_BAND, MAX_BAND = 64, 256

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Block:
    """A run of tokens: its pages (2, G, n), and where its tokens lie in what they gather."""

    index: Tensor
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row with several new tokens: `own` holds them, and what other ranks compute between them;
    then `bands` say who sees what there. No bands: causally."""

    first: int
    count: int
    own: Block
    earlier: tuple[Block, ...]
    bands: tuple[Band, ...] = ()


@dataclass(frozen=True, slots=True)
class BandedChunk:
    """One row with several new tokens in a layer with a window: `block` holds all its keys."""

    first: int
    count: int
    block: Block
    bands: tuple[Band, ...]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Rows with one new token each, padded to the longest.

    `rows` (B,) in the flat batch; `index` (J, G, B, n); tokens low ... high - 1 of each row's
    gather are keys. Where rows differ: `mask` (B, 1, 1, high - low) additive and `stale`, the rows
    of the gather, seen as (J * K * B * S, D), to zero.
    """

    rows: Tensor
    index: Tensor
    low: int
    high: int
    mask: Tensor | None
    stale: Tensor | None


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Index tensors of one step, on the device. `written`: tokens to write; None: all."""

    written: Tensor | None
    write_index: Tensor
    chunks: tuple[Chunk, ...]
    banded: tuple[BandedChunk, ...]
    decodes: tuple[DecodeBatch, ...]


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of a row with one new token: pages from `base` on, tokens low ... high - 1 there."""

    span: RowSpan
    slots: _Ints
    low: int
    high: int


class Planner:
    """Plans steps over the pages of `buffer`, for layers of one window (None: they see all)."""

    def __init__(self, buffer: KVBuffer, window: int | None) -> None:
        self._buffer, self._window = buffer, window
        self._device = buffer.data.device
        self._band = MIN_BAND if window is None else min(MAX_BAND, max(MIN_BAND, window))
        self._striped = StripedBands(window, self._band, buffer.dtype, buffer.data.device)
        self._mask = torch.zeros((0, 0))  # of a whole band, over as many keys as were needed so far

    def plan_write(self, batch: RaggedBatch) -> GatherPlan:
        """A plan that attends to nothing."""
        slots, offsets = batch.token_slots(), batch.positions() % batch.page_size
        written = batch.written()
        if written is not None:
            slots, offsets = slots[written], offsets[written]
        index = self._to_device(self._buffer.token_index(slots, offsets))
        return GatherPlan(None if written is None else self._to_device(written), index, (), (), ())

    def plan(self, batch: RaggedBatch) -> GatherPlan:
        """Raises nothing; `batch` comes from the step plan and is trusted."""
        several = [span for span in batch.spans if span.count > 1]
        singles = sorted(
            (self._keys(span) for span in batch.spans if span.count == 1), key=lambda k: k.high
        )
        full = self._window is None
        return replace(
            self.plan_write(batch),
            chunks=tuple(self._chunk(s) for s in several) if full else (),
            banded=() if full else tuple(self._banded(s) for s in several),
            decodes=tuple(self._decode(group) for group in self._group(singles)),
        )

    def _chunk(self, span: RowSpan) -> Chunk:
        step = max(CONTEXT_BLOCK_TOKENS, self._buffer.page_size)
        borders = range(span.earliest(None), span.start, step)
        earlier = tuple(self._block(span, low, min(low + step, span.start)) for low in borders)
        own = self._block(span, span.start, span.end)
        bands = () if span.at is None else self._striped.bands(span)
        return Chunk(span.first, span.count, own, earlier, bands)

    def _block(self, span: RowSpan, low: int, high: int) -> Block:
        size = self._buffer.page_size
        first = low // size
        index = self._buffer.object_index(span.pages(first, -(-high // size)))
        return Block(self._to_device(index), low - first * size, high - first * size)

    def _banded(self, span: RowSpan) -> BandedChunk:
        lowest = span.earliest(self._window)
        bands = self._plain_bands(span, lowest) if span.at is None else self._striped.bands(span)
        return BandedChunk(span.first, span.count, self._block(span, lowest, span.end), bands)

    def _plain_bands(self, span: RowSpan, lowest: int) -> tuple[Band, ...]:
        """Of a span without gaps, whose block begins at position `lowest`."""
        bands = []
        for low in range(span.start, span.end, self._band):
            high = min(low + self._band, span.end)
            key_low = span.earliest(self._window, low)
            mask = self._band_mask(low - key_low, high - low)
            keys = key_low - lowest, high - lowest
            bands.append(Band(low - span.start, high - span.start, *keys, mask))
        return tuple(bands)

    def _band_mask(self, before: int, count: int) -> Tensor | None:
        """The mask of `count` queries over `before` keys before them and themselves.

        What is hidden follows from how far a key lies before its query: all masks are parts of one.
        """
        assert self._window is not None, "bands are cut by the window"
        if before == 0 and count <= self._window:
            return None
        known = self._mask.shape[1] - self._band
        if before > known:
            known = min(self._window - 1, max(before, 2 * known))
            keys, queries = torch.arange(-known, self._band), torch.arange(self._band)[:, None]
            hidden = (keys > queries) | (keys <= queries - self._window)
            mask = torch.zeros(hidden.shape, dtype=self._buffer.dtype)
            self._mask = mask.masked_fill_(hidden, -torch.inf).to(self._device)
        return self._mask[:count, known - before : known + count]

    def _keys(self, span: RowSpan) -> _Keys:
        size = self._buffer.page_size
        low = span.earliest(self._window)
        first = low // size
        slots = span.pages(first, -(-span.end // size))
        return _Keys(span, slots, low - first * size, span.end - first * size)

    def _group(self, rows: list[_Keys]) -> list[list[_Keys]]:
        """Cut rows, sorted by length, where padding or memory would grow too large."""
        width = self._buffer.num_sides * self._buffer.num_kv_heads * self._buffer.head_dim
        token_bytes = width * self._buffer.dtype.itemsize
        groups: list[list[_Keys]] = []
        for row in rows:
            group = groups[-1] if groups else []
            limit = PAD_RATIO * group[0].high + 4 * self._buffer.page_size if group else 0
            too_big = (len(group) + 1) * row.high * token_bytes > DECODE_BATCH_BYTES
            if group and row.high <= limit and not too_big:
                group.append(row)
            else:
                groups.append([row])
        return groups

    def _decode(self, group: list[_Keys]) -> DecodeBatch:
        size = self._buffer.page_size
        most = max(len(row.slots) for row in group)
        slots = np.full((len(group), most), self._buffer.zero_slot, dtype=np.int64)
        for line, row in zip(slots, group, strict=True):
            line[: len(row.slots)] = row.slots
        lows, highs = (np.array(x) for x in zip(*((r.low, r.high) for r in group), strict=True))
        low, high = int(lows.min()), int(highs.max())
        mask = stale = None
        if int(lows.max()) != low or int(highs.min()) != high:
            tokens = np.arange(most * size)
            unused = (tokens < lows[:, None]) | (tokens >= highs[:, None])  # (B, S)
            ends = np.array([len(row.slots) * size for row in group])
            stale = self._to_device(self._stale_rows(unused & (tokens < ends[:, None])))
            mask = torch.zeros((len(group), 1, 1, high - low), dtype=self._buffer.dtype)
            mask.masked_fill_(torch.from_numpy(unused[:, None, None, low:high]), -torch.inf)
            mask = mask.to(self._device)
        return DecodeBatch(
            rows=self._to_device(np.array([row.span.first for row in group], dtype=np.int64)),
            index=self._to_device(self._buffer.object_index(slots)),
            low=low,
            high=high,
            mask=mask,
            stale=stale,
        )

    def _stale_rows(self, within: npt.NDArray[np.bool_]) -> _Ints:
        """Rows of (J * K, B * S) where `within` (B, S) is true, for every K and V head."""
        tokens = np.flatnonzero(within)
        rows = self._buffer.num_sides * self._buffer.num_kv_heads
        heads = np.arange(rows, dtype=np.int64) * within.size
        return np.ascontiguousarray((heads[:, None] + tokens).reshape(-1))

    def _to_device(self, array: _Ints) -> Tensor:
        return torch.from_numpy(array).to(self._device)
