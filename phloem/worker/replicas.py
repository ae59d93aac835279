"""Ranks that each hold every page: what one computes, it writes into the copies of the others too.

    rank 0's pool   [p0 p1 p2 p3]     page i of a row is computed by rank i mod N,
    rank 1's pool   [p0 p1 p2 p3]     and copied, layer by layer, before anybody reads the layer

The capacity is that of one rank. It is what dividing pages among ranks is measured against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from phloem.attention import RaggedBatch
from phloem.pools import DevicePool

__all__ = ["Replicas"]


class Replicas:
    """One rank's end. `layers[c]`: the model's numbers of the layers of component c."""

    def __init__(
        self, pools: Sequence[DevicePool], layers: Sequence[Sequence[int]], rank: int
    ) -> None:
        self._pools, self.rank = tuple(pools), rank
        self._places = {
            layer: (component, index)
            for component, numbers in enumerate(layers)
            for index, layer in enumerate(numbers)
        }
        self._written: list[Tensor] = []  # by component: pages that this step writes here

    def plan(self, batches: Sequence[RaggedBatch]) -> None:
        """A step begins that computes these tokens here."""
        self._written = []
        for batch in batches:
            slots, which = batch.token_slots(), batch.written()
            pages = np.unique(slots if which is None else slots[which])
            self._written.append(torch.from_numpy(pages))

    def then(self, written: Callable[[int], None]) -> Callable[[int], None]:
        """Copies a layer before `written` tells the others of it."""

        def both(layer: int) -> None:
            self.copy(layer)
            written(layer)

        return both

    def copy(self, layer: int) -> None:
        """This rank has written the layer: into the other pools with it, whole pages."""
        component, index = self._places[layer]
        pool, pages = self._pools[component], self._written[component]
        if not len(pages):
            return
        data = pool.buffer.data
        written = data[pages, :, index]
        for rank in range(pool.num_owners):
            if rank != self.rank:
                data[pages + (rank - self.rank) * pool.num_pages, :, index] = written
