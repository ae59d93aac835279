"""A ragged batch: which tokens of which rows one forward pass computes, and where they live."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["RaggedBatch", "RowSpan"]


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Tokens at absolute positions start ... start + count - 1 of one request.

    `first` is the index of the span's first token in the flat batch. `slots` are the request's
    pages in order, at least up to the last position of the span.
    """

    first: int
    start: int
    count: int
    slots: npt.NDArray[np.int64]

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Spans in flat order, without gaps: span i + 1 begins where span i ends."""

    spans: tuple[RowSpan, ...]
    page_size: int

    @property
    def num_tokens(self) -> int:
        return sum(span.count for span in self.spans)

    def positions(self) -> npt.NDArray[np.int64]:
        """The absolute position of every token, (N,)."""
        return np.concatenate([np.arange(s.start, s.end, dtype=np.int64) for s in self.spans])

    def token_slots(self) -> npt.NDArray[np.int64]:
        """The page slot of every token, (N,)."""
        return np.concatenate(
            [
                s.slots[np.arange(s.start, s.end, dtype=np.int64) // self.page_size]
                for s in self.spans
            ]
        )
