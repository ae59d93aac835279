"""Pages of a device pool as bytes that travel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.pools import DevicePool

__all__ = ["PoolBytes"]

_Slots = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


class PoolBytes:
    """Copies of pages in plain memory, in the order of the pool's layout, wherever the pool is.
    Slots are int64 (n,) of this rank's own pages.

    On a GPU a copy comes after all that was begun there before, since no thread has a stream of its
    own: after a step that has ended on the host alone, too. In plain memory the calling thread
    copies alone: the cores are for the steps.
    """

    def __init__(self, pool: DevicePool) -> None:
        data, spec = pool.buffer.data, pool.layout.spec
        self._num_pages = pool.num_pages
        groups, layers = int(data.shape[1]), spec.num_layers
        # (P, G, L, bytes of one layer of one head group)
        shape = (len(data), groups, layers, spec.page_bytes // max(1, groups * layers))
        self._pages = data.view(torch.uint8).view(shape)
        self._plain: _Bytes | None = self._pages.numpy() if data.device.type == "cpu" else None

    def room(self, count: int, num_layers: int) -> _Bytes:
        """Room for so many layers of so many pages, (n, G, layers, bytes)."""
        _, groups, _, size = self._pages.shape
        return np.empty((count, groups, num_layers, size), dtype=np.uint8)

    def read(self, slots: _Slots) -> _Bytes:
        """Whole pages, (n, G, L, bytes)."""
        if self._plain is not None:
            self._check(slots)
            return np.take(self._plain, slots, axis=0)
        pages: _Bytes = self.taken(slots).cpu().numpy()
        return pages

    def taken(self, slots: _Slots) -> Tensor:
        """The same where the pool is."""
        self._check(slots)
        return self._pages.index_select(0, torch.from_numpy(slots.copy()).to(self._pages.device))

    def write(self, slots: _Slots, first_layer: int, data: _Bytes) -> None:
        """Layers of pages from the first one on, as `room` lays them out."""
        self._check(slots)
        end_layer = first_layer + data.shape[2]
        if self._plain is not None:
            for slot, page in zip(slots.tolist(), data, strict=True):
                np.copyto(self._plain[slot, :, first_layer:end_layer], page)
            return
        for slot, part in zip(slots.tolist(), torch.from_numpy(data), strict=True):
            self._pages[slot, :, first_layer:end_layer].copy_(part)

    def _check(self, slots: _Slots) -> None:
        inside = ((slots >= 0) & (slots < self._num_pages)).all()
        assert inside, f"slots {slots} of a pool of {self._num_pages}"
