"""Window layers without weights: which state a token reads, and how right what it computes is.

A model has `layers` window layers. What layer j writes of a position comes from the output of the
one below; so a cell carries, beside position and id, of how many layers the outputs are right
there. That of layer j is right if all j - 1 below are right at every position that it reads:

    right(q) = min(layers, 1 + least right(k) of the positions k in q's window before it)

and 0 where part of the window cannot be read at all, as after a restart lower down. Whatever is
sampled, and whatever full state is written, must be right in all layers.

    restart at p:      p  |-- W-1 --|-- W-1 --|-- W-1 --|
    right in layers:      0         1         2         3
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phloem.core.plan import RowPlan
from phloem.core.refs import PageRefs, flat_slots

__all__ = ["FakeWindow", "PageFault", "WindowMemory"]

_POISON = -1
_RIGHT_SHIFT = 55  # a cell is right << 55 | position << 32 | id
_POSITION_SHIFT = 32
_CONTENT = (1 << _RIGHT_SHIFT) - 1

Cells = npt.NDArray[np.int64]


class PageFault(Exception):
    """A row read what was never computed, or what is not its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeWindow:
    """The window layers of a model without weights."""

    tokens: int  # the token itself included
    layers: int
    num_pages: int  # of each owner

    def __post_init__(self) -> None:
        assert self.tokens >= 1, f"a window of {self.tokens} tokens"
        assert 1 <= self.layers <= 255, f"{self.layers} window layers"


class WindowMemory:
    """The window component's pages, as the worker has them."""

    def __init__(self, window: FakeWindow, page_size: int, num_owners: int = 1) -> None:
        self.num_pages = window.num_pages
        num_pages = num_owners * window.num_pages
        self.cells: Cells = np.full((num_pages, page_size), _POISON, dtype=np.int64)
        self._flat = self.cells.reshape(-1)  # the same memory
        self._tokens = window.tokens
        self._layers = window.layers

    def free(self, refs: PageRefs) -> None:
        """Poison pages that were given back."""
        self.cells[flat_slots(refs, self.num_pages)] = _POISON

    def compute(self, table: Cells, ids: npt.NDArray[np.int32], plan: RowPlan) -> str | None:
        """Read and write what the row's window layers do; returns what is wrong with it.

        `table[p]` is the cell of position p, negative where there is none; `ids` are the row's
        tokens up to the end of the span.
        """
        start, end = plan.start, plan.start + plan.count
        first = max(start - self._tokens + 1, plan.window_from, 0)
        where = table[first:end]
        if where.min() < 0:
            missing = first + int(np.argmax(where < 0))
            return f"position {missing} has no window page ({start} ... {end} are computed)"
        content = (np.arange(first, end) << _POSITION_SHIFT) | ids[first:]
        old = self._flat[where]
        same = (old >= 0) & (old & _CONTENT == content)
        before = start - first
        fault = None
        if not same[:before].all():
            wrong = first + int(np.argmin(same[:before]))
            fault = f"position {wrong} is not in its window page ({start} ... {end} are computed)"
        right = np.where(same, old >> _RIGHT_SHIFT, 0)
        new = self._right(right[:before], first, plan)
        if (new < right[before:]).any():
            fault = f"window pages from position {start} on were right, and are overwritten"
        self._flat[where[before:]] = content[before:] | (new << _RIGHT_SHIFT)
        return fault or self._too_high(new, plan)

    def _right(self, read: Cells, first: int, plan: RowPlan) -> Cells:
        """Of how many layers the outputs at the span's positions are right."""
        count, window, layers = plan.count, self._tokens, self._layers
        cut = plan.window_from > max(0, plan.start - window + 1)
        if not cut and (not len(read) or int(read.min()) == layers):
            return np.full(count, layers, dtype=np.int64)
        right = read.tolist()
        for position in range(plan.start, plan.start + count):
            low = max(0, position - window + 1)
            if low < plan.window_from and low < position:
                right.append(0)
            else:
                right.append(min(layers, 1 + min(right[low - first :], default=layers)))
        return np.array(right[len(read) :], dtype=np.int64)

    def _too_high(self, right: Cells, plan: RowPlan) -> str | None:
        needs = max(0, plan.write_from - plan.start)
        if plan.sample:
            needs = min(needs, plan.count - 1)
        low = right[needs:]
        if (low < self._layers).any():
            at = plan.start + needs + int(np.argmax(low < self._layers))
            return f"position {at} is right in {int(low.min())} of {self._layers} window layers"
        return None
