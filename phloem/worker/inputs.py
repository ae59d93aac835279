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
class StepInputs:
    """`tokens` and `positions` are (N,); `batches` are the components' views of the same spans;
    `sampled` are the rows that want a token, and `last_index` (S,) their last positions in the flat
    batch."""

    tokens: Tensor
    positions: Tensor
    batches: tuple[RaggedBatch, ...]
    sampled: tuple[RowPlan, ...]
    last_index: Tensor


def build_inputs(
    plan: StepPlan,
    tables: RowTables,
    *,
    page_size: int,
    window: int | None = None,
    device: torch.device,
) -> StepInputs:
    """Flatten the plan's rows, in their order. The plan has at least one row.

    `window`: of the layers of component 1; None if there are none.
    """
    ids, sampled, last, firsts = [], [], [], []
    first = 0
    for row in plan.rows:
        ids.append(tables.tokens(row))
        firsts.append(first)
        first += row.count
        if row.sample:
            sampled.append(row)
            last.append(first - 1)
    rows = list(zip(plan.rows, firsts, strict=True))
    full = RaggedBatch(tuple(_full(row, at, tables, page_size) for row, at in rows), page_size)
    batches: tuple[RaggedBatch, ...] = (full,)
    if window is not None:
        spans = tuple(_window(row, at, tables, page_size, window) for row, at in rows)
        batches = (full, RaggedBatch(spans, page_size))
    return StepInputs(
        tokens=torch.from_numpy(np.concatenate(ids)).to(device),
        positions=torch.from_numpy(full.positions()).to(device),
        batches=batches,
        sampled=tuple(sampled),
        last_index=torch.tensor(last, dtype=torch.int64, device=device),
    )


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
