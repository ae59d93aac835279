"""A row as it looks where only some of its pages are: those are put side by side.

    pages of the row    | a | b | c | d | e |         c and e are here
    its keys here                   | c | e |         at positions of their own, 0 ... 2 T - 1
    a query in d        sees c: it is asked as if at the last position of c
    a query in e        sees c and its part of e

All tokens of a page before a query's own are seen, so order among what is here is all that matters,
and an ordinary causal kernel computes the part of the attention that is here. Windows count
positions in between, so this is for layers without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phloem.attention.batch import RaggedBatch, RowSpan

__all__ = ["Held", "held_part", "join_held"]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Held:
    """`batch`: the tokens `index` (n,) of another one that see at least one key here."""

    batch: RaggedBatch
    index: _Ints


def held_part(
    batch: RaggedBatch,
    is_here: Callable[[_Ints], npt.NDArray[np.bool_]],
    slots_of: Callable[[_Ints], _Ints],
) -> Held:
    """What of `batch` is here; its tables begin at page 0 and hold global page numbers.

    `is_here` (n,) of global numbers; `slots_of` those that are: where they lie here.
    """
    spans: list[RowSpan] = []
    index: list[_Ints] = []
    first = 0
    for span in batch.spans:
        assert span.base == 0, "without a window a row's table begins at its first page"
        here = is_here(span.slots)
        before = np.concatenate([[0], np.cumsum(here)])  # pages that are here, before each page
        positions, size = span.positions(), batch.page_size
        pages = positions // size
        last = before[pages] * size - 1 + np.where(here[pages], positions % size + 1, 0)
        sees = np.flatnonzero(last >= 0)
        if not len(sees):
            continue
        slots = slots_of(span.slots[here])
        spans.append(_span(first, last[sees], slots[: int(last[-1]) // size + 1]))
        index.append(span.first + sees)
        first += len(sees)
    joined = np.concatenate(index) if index else np.empty(0, dtype=np.int64)
    return Held(RaggedBatch(tuple(spans), batch.page_size), joined)


def join_held(parts: Iterable[RaggedBatch], page_size: int) -> RaggedBatch:
    """Several batches as one, in their order."""
    spans: list[RowSpan] = []
    first = 0
    for part in parts:
        for span in part.spans:
            spans.append(replace(span, first=first))
            first += span.count
    return RaggedBatch(tuple(spans), page_size)


def _span(first: int, at: _Ints, slots: _Ints) -> RowSpan:
    start, count = int(at[0]), len(at)
    plain = count == 1 or bool((np.diff(at) == 1).all())
    return RowSpan(first, start, count, slots, at=None if plain else at)
