"""A ragged batch: which tokens of which rows one forward pass computes, and where they live.

One component's view of a span: its pages, what it may read, what it must not write.

    pages       base ... base + len(slots)
    positions   read_from ... start ... end      read_from <= start: queries see nothing below it
                          write_from             K and V below it are in the pages already
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["RaggedBatch", "RowSpan"]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Tokens at absolute positions start ... start + count - 1 of one request.

    `first` is the index of the span's first token in the flat batch. `slots` are the request's
    pages in order from page `base` on, at least from the first position that is read up to the
    last one of the span. Pages of positions below `read_from` may be anything.
    """

    first: int
    start: int
    count: int
    slots: _Ints
    base: int = 0
    read_from: int = 0
    write_from: int = 0

    @property
    def end(self) -> int:
        return self.start + self.count

    def pages(self, low: int, high: int) -> _Ints:
        """The slots of pages low ... high - 1 of the request."""
        return self.slots[low - self.base : high - self.base]

    def earliest(self, window: int | None, position: int | None = None) -> int:
        """The first position that a query at `position` sees (the span's first one, if None)."""
        at = self.start if position is None else position
        return self.read_from if window is None else max(self.read_from, at - window + 1)


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Spans in flat order, without gaps: span i + 1 begins where span i ends."""

    spans: tuple[RowSpan, ...]
    page_size: int

    @property
    def num_tokens(self) -> int:
        return sum(span.count for span in self.spans)

    def positions(self) -> _Ints:
        """The absolute position of every token, (N,)."""
        return np.concatenate([np.arange(s.start, s.end, dtype=np.int64) for s in self.spans])

    def token_slots(self) -> _Ints:
        """The page slot of every token, (N,)."""
        return np.concatenate(
            [
                s.slots[np.arange(s.start, s.end, dtype=np.int64) // self.page_size - s.base]
                for s in self.spans
            ]
        )

    def written(self) -> _Ints | None:
        """Indices of the tokens whose K and V are written; None if they all are."""
        if all(s.write_from <= s.start for s in self.spans):
            return None
        return np.concatenate(
            [
                np.arange(s.first + min(max(s.write_from - s.start, 0), s.count), s.first + s.count)
                for s in self.spans
            ]
        ).astype(np.int64)
