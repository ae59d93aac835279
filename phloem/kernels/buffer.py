"""A page pool as ops see it: one flat tensor, addressed by rows.

    data          (P + 1, G, L, J, T, h, D)   page, head group, layer, k/v, token, head, dim
    object rows   (.., T * h * D)   one per (page, head group, layer, k/v): what reads gather
    token rows    (.., h * D)       one per (page, head group, layer, k/v, token): for writes

Row numbers are computed for layer 0 once per step; a layer's rows are the same numbers in a view
that starts later. The page after the last one is all zeros, never written: padding points at it.
J sides: K and V, or one where both are made of the same row (MLA).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from phloem.kernels.codec import RowCodec

__all__ = ["KVBuffer"]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class KVBuffer:
    """`data` is contiguous, (P + 1, G, L, J, T, h, D). With a `codec` D are its items, and rows are
    computed in its dtype.

    `groups`: first and last + 1 of the head groups that are read and written here, where other
    ranks have those of the same pages; None: all of them.
    """

    data: Tensor
    codec: RowCodec | None = None
    groups: tuple[int, int] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What rows are computed in."""
        return self.data.dtype if self.codec is None else self.codec.dtype

    def encode(self, rows: Tensor) -> Tensor:
        """Rows (..., head_dim) as `data` holds them."""
        return rows if self.codec is None else self.codec.encode(rows)

    def decode(self, stored: Tensor) -> Tensor:
        """What was read of `data`, (..., items), as rows (..., head_dim)."""
        return stored if self.codec is None else self.codec.decode(stored)

    @property
    def zero_slot(self) -> int:
        """The page of zeros that padding reads."""
        return int(self.data.shape[0]) - 1

    @property
    def head_groups(self) -> tuple[int, int]:
        """First and last + 1 of the head groups."""
        return (0, int(self.data.shape[1])) if self.groups is None else self.groups

    @property
    def num_head_groups(self) -> int:
        low, high = self.head_groups
        return high - low

    @property
    def num_layers(self) -> int:
        return int(self.data.shape[2])

    @property
    def num_sides(self) -> int:
        """2: K and V; 1: rows that are both."""
        return int(self.data.shape[3])

    @property
    def page_size(self) -> int:
        return int(self.data.shape[4])

    @property
    def heads_per_group(self) -> int:
        return int(self.data.shape[5])

    @property
    def head_dim(self) -> int:
        return self.row_items if self.codec is None else self.codec.head_dim

    @property
    def row_items(self) -> int:
        """Items of `data` that a row takes."""
        return int(self.data.shape[6])

    @property
    def num_kv_heads(self) -> int:
        return self.num_head_groups * self.heads_per_group

    def layer(self, layer: int) -> Tensor:
        """One layer's pages, a view (P + 1, G, J, T, h, D)."""
        return self.data[:, slice(*self.head_groups), layer]

    def object_rows(self, layer: int) -> Tensor:
        """The view into which `object_index` points, for one layer."""
        rows = self.data.view(-1, self.page_size * self.heads_per_group * self.row_items)
        return rows[self.num_sides * layer :]

    def token_rows(self, layer: int, kv: int) -> Tensor:
        """The view into which `token_index` points, for one layer's K (kv 0) or V (kv 1)."""
        rows = self.data.view(-1, self.heads_per_group * self.row_items)
        return rows[(self.num_sides * layer + kv) * self.page_size :]

    def object_index(self, slots: _Ints) -> _Ints:
        """Object rows of many pages, K before V, a group's pages side by side: (J, G, *slots)."""
        groups = np.arange(*self.head_groups, dtype=np.int64)
        kv = np.arange(self.num_sides, dtype=np.int64)
        ones = (1,) * slots.ndim
        page_group = slots * int(self.data.shape[1]) + groups.reshape(-1, *ones)
        return page_group * (self.num_sides * self.num_layers) + kv.reshape(-1, 1, *ones)

    def token_index(self, slots: _Ints, offsets: _Ints) -> _Ints:
        """Token rows of tokens at `offsets` (N,) within pages `slots` (N,): (N * G,)."""
        groups = np.arange(*self.head_groups, dtype=np.int64)
        page_group = slots[:, None] * int(self.data.shape[1]) + groups
        rows = self.num_sides * self.num_layers * self.page_size  # of a page's head group
        index = page_group * rows + offsets[:, None]
        return np.ascontiguousarray(index.reshape(-1))
