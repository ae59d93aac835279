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
    """`tokens` and `positions` are (N,); `sampled` are the rows that want a token, and
    `last_index` (S,) their last positions in the flat batch."""

    tokens: Tensor
    positions: Tensor
    batch: RaggedBatch
    sampled: tuple[RowPlan, ...]
    last_index: Tensor


def build_inputs(
    plan: StepPlan, tables: RowTables, *, page_size: int, device: torch.device
) -> StepInputs:
    """Flatten the plan's rows, in their order. The plan has at least one row."""
    ids, spans, sampled, last = [], [], [], []
    first = 0
    for row in plan.rows:
        ids.append(tables.tokens(row))
        end = row.start + row.count
        slots = tables.slots(row.row, pages_for_tokens(end, page_size))
        spans.append(RowSpan(first, row.start, row.count, slots))
        first += row.count
        if row.sample:
            sampled.append(row)
            last.append(first - 1)
    batch = RaggedBatch(tuple(spans), page_size)
    return StepInputs(
        tokens=torch.from_numpy(np.concatenate(ids)).to(device),
        positions=torch.from_numpy(batch.positions()).to(device),
        batch=batch,
        sampled=tuple(sampled),
        last_index=torch.tensor(last, dtype=torch.int64, device=device),
    )
