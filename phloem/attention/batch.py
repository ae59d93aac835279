"""A ragged batch: which tokens of which rows one forward pass computes, and where they live.

One component's view of a span: its pages, what it may read, what it must not write.

    pages       base ... base + len(slots)
    positions   read_from ... start ... end      read_from <= start: queries see nothing below it
                          write_from             K and V below it are in the pages already

Where several ranks share a request, a rank's span holds only the tokens whose pages it owns. Its
queries see all the others' pages in between, since a rank attends when all have written.

    pages       |  r0  |  r1  |  r0  |  r1  |       of rank 0: one span of two runs
    tokens      |......|      |......|
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["RaggedBatch", "RowSpan"]

_Ints = npt.NDArray[np.int64]
_NO_INTS: _Ints = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RowSpan:
    """`count` tokens of one request, at absolute positions from `start` on.

    `at` (count,): their positions, where they do not follow one another; they never fall, and
    at[0] == start. None: start ... start + count - 1. `first` is the index of the span's first
    token in the flat batch. `slots` are the request's pages in order from page `base` on, at least
    from the first position that is read up to the last one of the span. Pages of positions below
    `read_from` may be anything.
    """

    first: int
    start: int
    count: int
    slots: _Ints
    base: int = 0
    read_from: int = 0
    write_from: int = 0
    at: _Ints | None = None

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + self.count if self.at is None else int(self.at[-1]) + 1

    def positions(self) -> _Ints:
        """The absolute position of each token, (count,)."""
        if self.at is None:
            return np.arange(self.start, self.start + self.count, dtype=np.int64)
        return self.at

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(index within the span, first position, number of tokens) of runs without gaps."""
        if self.at is None:
            yield 0, self.start, self.count
            return
        borders = np.flatnonzero(np.diff(self.at) != 1) + 1
        lows = [0, *borders.tolist()]
        for low, high in zip(lows, [*lows[1:], self.count], strict=True):
            yield low, int(self.at[low]), high - low

    def pages(self, low: int, high: int) -> _Ints:
        """The slots of pages low ... high - 1 of the request."""
        return self.slots[low - self.base : high - self.base]

    def earliest(self, window: int | None, position: int | None = None) -> int:
        """The first position that a query at `position` sees (the span's first one, if None)."""
        at = self.start if position is None else position
        return self.read_from if window is None else max(self.read_from, at - window + 1)


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Spans in flat order, without gaps: span i + 1 begins where span i ends.

    `kept`: the tokens whose K and V are written here at all, where another rank that computes the
    same ones writes the others; None: all.
    """

    spans: tuple[RowSpan, ...]
    page_size: int
    kept: _Ints | None = None

    @property
    def num_tokens(self) -> int:
        return sum(span.count for span in self.spans)

    def positions(self) -> _Ints:
        """The absolute position of every token, (N,)."""
        return _joined([span.positions() for span in self.spans])

    def token_slots(self) -> _Ints:
        """The page slot of every token, (N,)."""
        return _joined([s.slots[s.positions() // self.page_size - s.base] for s in self.spans])

    def written(self) -> _Ints | None:
        """Indices of the tokens whose K and V are written; None if they all are."""
        if all(s.write_from <= s.start for s in self.spans):
            return self.kept
        fresh = _joined(
            [s.first + np.flatnonzero(s.positions() >= s.write_from) for s in self.spans]
        )
        return fresh if self.kept is None else np.intersect1d(fresh, self.kept, assume_unique=True)


def _joined(parts: list[_Ints]) -> _Ints:
    return np.concatenate(parts) if parts else _NO_INTS
