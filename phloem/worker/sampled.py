"""The last token of every row: who samples writes it, the others read it, from the same memory or
from a copy of their own."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from phloem.core.plan import RowPlan

__all__ = ["SampledTokens"]

_WORD = np.dtype(np.int64).itemsize


class SampledTokens:
    """`tokens` (max_running,) int64, and which sample each of them was.

    Written in a step by the rank that samples the row; read by all when every rank has finished it.
    """

    def __init__(self, max_running: int, memory: mmap.mmap | None = None) -> None:
        """`memory`: `num_bytes`, all zero at first, that the ranks share; None: of this one."""
        both = np.zeros(2 * max_running, dtype=np.int64)
        if memory is not None:
            both = np.frombuffer(memory, dtype=np.int64, count=2 * max_running)
        self.tokens, self._stamps = both[:max_running], both[max_running:]

    @staticmethod
    def num_bytes(max_running: int) -> int:
        """How much memory it takes."""
        return 2 * max_running * _WORD

    def put(self, plan: RowPlan, token: int) -> None:
        """`plan` has sampled a token."""
        self.tokens[plan.row] = token
        self._stamps[plan.row] = _stamp(plan)

    def read(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The tokens of these rows and which sample each of them was, (n, 2): they travel so."""
        return np.stack((self.tokens[rows], self._stamps[rows]), axis=1)

    def write(self, rows: npt.NDArray[np.int64], both: npt.NDArray[np.int64]) -> None:
        """What `read` has returned on the rank that sampled them."""
        self.tokens[rows], self._stamps[rows] = both[:, 0], both[:, 1]

    def find(self, plan: RowPlan) -> int | None:
        """What `plan` has sampled; None if it failed to, or if a later one has sampled since."""
        if self._stamps[plan.row] != _stamp(plan):
            return None
        return int(self.tokens[plan.row])


def _stamp(plan: RowPlan) -> int:
    """Of no other sample, and never 0."""
    return (plan.serial << 32 | plan.output_index) + 1
