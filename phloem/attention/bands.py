"""Bands of a rank's queries between which lie the tokens of other ranks.

keys        |  clear: all of the band's queries see them  |  first query ... last one: mask  |
queries                                                   |..|    |..|    |..|    |..|    |..|
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.attention.batch import RowSpan

__all__ = ["Band", "StripedBands"]

# Queries of a band without a window. Only keys between its first and its last query need a mask;
# fewer queries waste less of those products, more make fewer and larger calls.
FULL_BAND = 256

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Band:
    """Queries low ... high - 1 of a chunk over keys key_low ... key_high - 1 of its block.

    `mask` (queries, keys), additive; None: causal, as many keys as queries. All of the queries see
    the `clear` keys before these as well.
    """

    low: int
    high: int
    key_low: int
    key_high: int
    mask: Tensor | None
    clear: int = 0


class StripedBands:
    """Cuts spans with gaps. `width`: positions that a band covers in layers with a `window`;
    masks are additive, of `dtype` and on `device`."""

    def __init__(
        self, window: int | None, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._window, self._width = window, width
        self._dtype, self._device = dtype, device

    def bands(self, span: RowSpan) -> tuple[Band, ...]:
        """The bands of a span. The keys of its block begin at its first position without a window,
        else at the first position that it sees.
        """
        at = span.positions()
        if self._window is None:
            return tuple(self._full(at, low) for low in range(0, len(at), FULL_BAND))
        bands, low = [], 0
        while low < len(at):
            high = int(np.searchsorted(at, at[low] + self._width))
            bands.append(self._windowed(span, at, low, high))
            low = high
        return tuple(bands)

    def _full(self, at: _Ints, low: int) -> Band:
        queries = at[low : low + FULL_BAND]
        first, end = int(queries[0]), int(queries[-1]) + 1
        keys = np.arange(first, end)
        mask = self._additive(keys > queries[:, None])
        start = int(at[0])
        return Band(low, low + len(queries), first - start, end - start, mask, first - start)

    def _windowed(self, span: RowSpan, at: _Ints, low: int, high: int) -> Band:
        assert self._window is not None, "bands are cut by the window"
        queries = at[low:high]
        first, end = span.earliest(self._window, int(queries[0])), int(queries[-1]) + 1
        keys = np.arange(first, end)
        hidden = (keys > queries[:, None]) | (keys <= queries[:, None] - self._window)
        lowest = span.earliest(self._window)
        return Band(low, high, first - lowest, end - lowest, self._additive(hidden))

    def _additive(self, hidden: npt.NDArray[np.bool_]) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype)
        return mask.masked_fill_(torch.from_numpy(hidden), -torch.inf).to(self._device)
