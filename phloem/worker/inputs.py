"""Step plan -> the flat tensors of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phloem.attention import RaggedBatch, RowSpan
from phloem.core.plan import RowPlan, StepPlan
from phloem.kv.sizing import pages_for_tokens
from phloem.worker.rows import RowTables

__all__ = ["StepInputs", "build_inputs"]


@dataclass(frozen=True, slots=True)
class RankShare:
    rank: int
    pages_per_rank: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """`tokens` and `positions` are (N,); `batches` are the components' views of the same spans;
    `sampled` are the rows that want a token, and `last_index` (S,) their last positions in the flat
    batch."""

    tokens: Tensor
    positions: Tensor
    batches: tuple[RaggedBatch, ...]
    sampled: tuple[RowPlan, ...]
    last_index: Tensor
    rows: tuple[RowPlan, ...] = ()


def build_inputs(
    plan: StepPlan,
    tables: RowTables,
    *,
    page_size: int,
    window: int | None = None,
    device: torch.device,
    share: RankShare | None = None,
) -> StepInputs:
    ids, sampled, last, rows = [], [], [], []
    first = 0
    for row in plan.rows:
        tokens = tables.tokens(row)
        for low, high in _runs(row, tables, page_size, share):
            ids.append(tokens[low - row.start : high - row.start])
            from dataclasses import replace

            rows.append((replace(row, start=low, count=high - low), first))
            first += high - low
            if row.sample and high == row.start + row.count:
                sampled.append(row)
                last.append(first - 1)
    full = RaggedBatch(tuple(_full(row, at, tables, page_size) for row, at in rows), page_size)
    batches: tuple[RaggedBatch, ...] = (full,)
    if window is not None:
        spans = tuple(_window(row, at, tables, page_size, window) for row, at in rows)
        batches = (full, RaggedBatch(spans, page_size))
    empty = np.empty(0, dtype=np.int64)
    return StepInputs(
        tokens=torch.from_numpy(np.concatenate([empty, *ids])).to(device),
        positions=torch.from_numpy(full.positions() if rows else empty).to(device),
        batches=batches,
        sampled=tuple(sampled),
        rows=tuple(row for row, _ in rows),
        last_index=torch.tensor(last, dtype=torch.int64, device=device),
    )


def _runs(row, tables, page_size, share):
    end = row.start + row.count
    if share is None:
        return [(row.start, end)]
    slots = tables.slots(row.row, pages_for_tokens(end, page_size))
    out = []
    for page in range(row.start // page_size, pages_for_tokens(end, page_size)):
        if slots[page] // share.pages_per_rank != share.rank:
            continue
        low, high = max(row.start, page * page_size), min(end, (page + 1) * page_size)
        if out and out[-1][1] == low:
            out[-1] = (out[-1][0], high)
        else:
            out.append((low, high))
    return out


def _full(row: RowPlan, first: int, tables: RowTables, page_size: int) -> RowSpan:
    """All pages of the row; what is shared is read and not written again."""
    slots = tables.slots(row.row, pages_for_tokens(row.start + row.count, page_size))
    return RowSpan(first, row.start, row.count, slots, write_from=row.write_from)


def _window(row: RowPlan, first: int, tables: RowTables, page_size: int, window: int) -> RowSpan:
    """The pages within the window of the row's first token, and those of its own tokens."""
    low = max(row.window_from, row.start - window + 1, 0)
    base = low // page_size
    end = pages_for_tokens(row.start + row.count, page_size)
    slots = tables.slots(row.row, end, first_page=base, component=1)
    return RowSpan(first, row.start, row.count, slots, base=base, read_from=row.window_from)
