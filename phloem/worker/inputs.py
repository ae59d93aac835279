"""Step plan -> the flat tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.attention import RaggedBatch, RowSpan
from phloem.core.mesh import ShardAxis
from phloem.core.plan import RowPlan, StepPlan
from phloem.kv.sizing import pages_for_tokens
from phloem.worker.rows import RowTables

__all__ = ["RankShare", "StepInputs", "build_batches", "build_inputs"]

_Ints = npt.NDArray[np.int64]


def _the_pages(pages: _Ints) -> _Ints:
    """There are no replicas."""
    return pages


@dataclass(frozen=True, slots=True)
class RankShare:
    """Which tokens of a step `rank` computes: those whose page of component 0 it owns.

    Tables then hold global page numbers: owner * pages_per_rank + slot. `copies`: as many ranks
    hold every page, and page i of a row is computed by rank i mod copies; 0: pages have owners.
    `kept`: first and last + 1 of the pages that it writes of those that it computes, where other
    ranks compute the same tokens; None: all.
    `reads`: which pages it reads in the stead of those of component 0: replicas of its own.
    """

    rank: int
    pages_per_rank: int
    copies: int = 0
    kept: tuple[int, int] | None = None
    reads: Callable[[_Ints], _Ints] = _the_pages

    @classmethod
    def of_owner(cls, owner: int, axis: ShardAxis, pages_per_owner: int) -> RankShare:
        """What is computed in the row of an owner, and what of it that owner keeps."""
        each = axis.owners_per_row
        kept = (owner * pages_per_owner, (owner + 1) * pages_per_owner) if each > 1 else None
        return cls(owner // each, each * pages_per_owner, kept=kept)

    def positions(self, row: RowPlan, tables: RowTables, page_size: int) -> _Ints | None:
        """The row's own positions, in order; None: all of them."""
        first = row.start // page_size
        end = pages_for_tokens(row.start + row.count, page_size)
        pages = tables.slots(row.row, end, first_page=first)
        if self.copies:
            own = np.arange(first, end) % self.copies == self.rank
        else:
            own = pages // self.pages_per_rank == self.rank
        if own.all():
            return None
        at: _Ints = np.arange(row.start, row.start + row.count, dtype=np.int64)
        mine: _Ints = at[own[at // page_size - first]]
        return mine

    def ends(self, rows: Sequence[RowPlan], tables: RowTables, page_size: int) -> _Ints:
        """In whose share the last token of each row lies, as `rank` counts, (n,)."""
        last = np.array([(row.start + row.count - 1) // page_size for row in rows], dtype=np.int64)
        if self.copies:
            return last % self.copies
        return tables.pages_at([row.row for row in rows], last) // self.pages_per_rank


@dataclass(frozen=True, slots=True)
class StepInputs:
    """`tokens` and `positions` are (N,); `batches` are the components' views of the same spans, one
    for each of `rows`, which lack those of which this rank computes nothing. `sampled` are the rows
    that want a token from here, and `last_index` (S,) their last positions in the flat batch."""

    tokens: Tensor
    positions: Tensor
    batches: tuple[RaggedBatch, ...]
    rows: tuple[RowPlan, ...]
    sampled: tuple[RowPlan, ...]
    last_index: Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """What is computed here of a row: as `RowSpan`, without pages."""

    row: RowPlan
    first: int
    start: int
    count: int
    at: _Ints | None

    @property
    def end(self) -> int:
        return self.start + self.count if self.at is None else int(self.at[-1]) + 1

    @property
    def samples(self) -> bool:
        return self.row.sample and self.end == self.row.start + self.row.count

    def tokens(self, tables: RowTables) -> _Ints:
        ids = tables.tokens(self.row)
        low = self.start - self.row.start
        return ids[low : low + self.count] if self.at is None else ids[self.at - self.row.start]


def build_inputs(
    plan: StepPlan,
    tables: RowTables,
    *,
    page_size: int,
    window: int | None = None,
    device: torch.device,
    share: RankShare | None = None,
) -> StepInputs:
    """Flatten the plan's rows, in their order. The plan has at least one row.

    `window`: of the layers of component 1; None if there are none. `share`: what this rank computes
    of them, perhaps nothing; None: everything.
    """
    parts = _parts(plan, tables, page_size, share)
    batches = _batches(parts, tables, page_size, window, share)
    ids = [part.tokens(tables) for part in parts]
    last = [part.first + part.count - 1 for part in parts if part.samples]
    return StepInputs(
        tokens=_on(device, np.concatenate(ids) if ids else np.empty(0, np.int64)),
        positions=_on(device, batches[0].positions()),
        batches=batches,
        rows=tuple(part.row for part in parts),
        sampled=tuple(part.row for part in parts if part.samples),
        last_index=_on(device, np.array(last, dtype=np.int64)),
    )


def _on(device: torch.device, ints: _Ints) -> Tensor:
    """`ints` there. On a CPU nothing of PyTorch's runs, which would give the interpreter away."""
    tensor = torch.from_numpy(ints)
    return tensor if device.type == "cpu" else tensor.to(device)


def build_batches(
    plan: StepPlan,
    tables: RowTables,
    *,
    page_size: int,
    window: int | None = None,
    share: RankShare,
) -> tuple[RaggedBatch, ...]:
    """`StepInputs.batches` alone: what other ranks need to know of what one computes."""
    parts = _parts(plan, tables, page_size, share)
    return _batches(parts, tables, page_size, window, share)


def _kept(batch: RaggedBatch, low: int, high: int) -> RaggedBatch:
    """The same, of which only pages low ... high - 1 are written."""
    slots = batch.token_slots()
    return replace(batch, kept=np.flatnonzero((low <= slots) & (slots < high)))


def _batches(
    parts: list[_Part],
    tables: RowTables,
    page_size: int,
    window: int | None,
    share: RankShare | None,
) -> tuple[RaggedBatch, ...]:
    batches = [
        RaggedBatch(tuple(_full(part, tables, page_size, share) for part in parts), page_size)
    ]
    if window is not None:
        spans = tuple(_window(part, tables, page_size, window) for part in parts)
        batches.append(RaggedBatch(spans, page_size))
    if share is not None and share.kept is not None:
        batches = [_kept(batch, *share.kept) for batch in batches]
    return tuple(batches)


def _parts(
    plan: StepPlan, tables: RowTables, page_size: int, share: RankShare | None
) -> list[_Part]:
    parts, first = [], 0
    for row in plan.rows:
        at = None if share is None else share.positions(row, tables, page_size)
        if at is None:
            part = _Part(row, first, row.start, row.count, None)
        elif not len(at):
            continue
        else:
            gaps = int(at[-1]) - int(at[0]) >= len(at)
            part = _Part(row, first, int(at[0]), len(at), at if gaps else None)
        parts.append(part)
        first += part.count
    return parts


def _full(part: _Part, tables: RowTables, page_size: int, share: RankShare | None) -> RowSpan:
    """All pages of the row; what is shared is read and not written again, replicas included."""
    slots = tables.slots(part.row.row, pages_for_tokens(part.end, page_size))
    if share is not None:
        slots = share.reads(slots)
    write_from = part.row.write_from
    return RowSpan(part.first, part.start, part.count, slots, write_from=write_from, at=part.at)


def _window(part: _Part, tables: RowTables, page_size: int, window: int) -> RowSpan:
    """The pages within the window of the part's first token, and those of its own tokens."""
    low = max(part.row.window_from, part.start - window + 1, 0)
    base = low // page_size
    end = pages_for_tokens(part.end, page_size)
    slots = tables.slots(part.row.row, end, first_page=base, component=1)
    return RowSpan(
        part.first,
        part.start,
        part.count,
        slots,
        base=base,
        read_from=part.row.window_from,
        at=part.at,
    )
