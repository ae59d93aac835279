"""The other ranks of a step where no memory is shared with them: what `Peers` does, over a group.

Every rank reads and writes its own memory alone, and what travels is a copy that its owner has made
in its own order of steps: so a page may be written again as soon as the owner comes to it, and
nobody waits for a layer. What is left of a step are the tokens that it sampled. They leave at its
end, in one message from who sampled them to each other rank, those of its own row included, and are
waited for where the next step begins; a step that samples nothing sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.core.group import Group, Pending
from phloem.core.plan import RowPlan
from phloem.worker.sampled import SampledTokens

__all__ = ["GroupPeers"]

_Ints = npt.NDArray[np.int64]


class GroupPeers:
    """Over a group of all ranks, which it leaves. Belongs to the thread that runs the steps.

    `sampled`: this rank's copy; the same on all ranks when a step has begun.
    """

    def __init__(self, group: Group[Tensor], sampled: SampledTokens) -> None:
        self._group, self._sampled = group, sampled
        self._last_step = -1
        self._flight: Pending | None = None  # tokens of the last step
        self._rows: list[_Ints] = []  # by rank: of these
        self._arrived: list[Tensor] = []

    @property
    def rank(self) -> int:
        return self._group.rank

    def tell(self, on_move: Callable[[], None]) -> None:
        """Exchanges end with every layer, and who passes one tells by itself."""

    def moved(self, rank: int) -> object:  # noqa: ARG002
        """What other ranks do is not seen from here."""
        return None

    def begin(self, step: int) -> None:
        """What all have sampled in the step before is here. GroupError if a rank is gone."""
        assert step > self._last_step, f"step {step} after step {self._last_step}"
        if self._flight is None:
            return
        self._flight.finish()
        self._flight = None
        for rank, rows in enumerate(self._rows):
            if rank != self.rank:
                self._sampled.write(rows, self._arrived[rank].numpy())

    def written(self, step: int, layer: int) -> None:
        """Nobody reads this rank's memory."""

    def post(self, step: int, layer: int) -> None:
        """As `written`."""

    def finished(self, step: int, sampled: Sequence[RowPlan] = (), by: Sequence[int] = ()) -> None:
        """This rank is done with `step`, in which rank `by[i]` has sampled `sampled[i]`."""
        self._last_step = step
        if not sampled:
            return
        rows, ranks = np.array([row.row for row in sampled], dtype=np.int64), np.array(by)
        self._rows = [rows[ranks == rank] for rank in range(self._group.size)]
        mine = torch.from_numpy(self._sampled.read(self._rows[self.rank]))
        self._arrived = [mine.new_empty((len(of_rank), 2)) for of_rank in self._rows]
        self._flight = self._group.begin_all_gather(self._arrived, mine)

    def leave(self) -> None:
        """Others that wait for this rank are told. Idempotent."""
        self._group.close()
