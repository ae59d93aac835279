"""The device pool: all KV pages of one rank, in the byte layout of `kv/layout.py`.

Ranks of one machine may have their pools side by side in one memory that all of them map:

    owner 0: P pages | owner 1: P pages | ... | one page of zeros, for padding
    index = owner * P + slot
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import numpy.typing as npt
import torch

from phloem.core.errors import ConfigError
from phloem.core.refs import PageRef, PageRefs, flat_slots
from phloem.kernels import KVBuffer, make_codec
from phloem.kernels.codec import torch_dtype
from phloem.kv.layout import PageLayout
from phloem.pools.ahead import populate

__all__ = ["DevicePool", "torch_dtype"]

# As the host arena: a copy to a place a little higher within its 4 KiB takes four times as long,
# since the processor takes its loads to depend on the stores just before them.
_ALIGNMENT = 4096


class DevicePool:
    """One flat tensor of the pages of all owners, and one page of zeros for padding after them.

    `layout.num_pages` is that of one owner. Pages start as zeros. It knows no free list: the
    control plane has them. `dtype`: what K and V are computed in, and read as; None: as they are
    stored, or fp32 if they are packed. `groups`: as of `KVBuffer`, where this rank computes some of
    the heads only: `buffer` and `fill_nan` are of these, all else is whole pages.
    """

    def __init__(
        self,
        layout: PageLayout,
        *,
        device: torch.device,
        dtype: torch.dtype | None = None,
        num_owners: int = 1,
        first_owner: int = 0,
        memory: mmap.mmap | None = None,
        groups: tuple[int, int] | None = None,
    ) -> None:
        """`memory`: at least `shared_bytes`, all zero at first, which other ranks map too.

        `first_owner`: whose pages come first, where those of the ranks before it lie elsewhere.
        """
        self.layout = layout
        self.num_owners = num_owners
        self._first_page = first_owner * layout.num_pages
        shape = (num_owners * layout.num_pages + 1, *layout.shape[1:])
        stored = torch_dtype(layout.spec.dtype)
        try:
            if memory is None:
                data = _zeros(shape, stored, device)
            else:
                assert device.type == "cpu", f"shared memory is no memory of {device}"
                size = math.prod(shape) * stored.itemsize
                raw = np.frombuffer(memory, dtype=np.uint8, count=size)
                data = torch.from_numpy(raw).view(stored).view(shape)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"cannot allocate {layout.total_bytes:,} bytes of KV pages on {device}; "
                "lower the KV memory"
            ) from error
        unpacked = torch.float32 if layout.spec.dtype.is_packed else data.dtype
        self.buffer = KVBuffer(data, make_codec(layout.spec, dtype or unpacked), groups)

    @staticmethod
    def shared_bytes(layout: PageLayout, num_owners: int) -> int:
        """How much memory the pools of all owners take together."""
        return num_owners * layout.total_bytes + layout.spec.page_bytes

    @property
    def num_pages(self) -> int:
        """Of one owner."""
        return self.layout.num_pages

    def indices(self, refs: PageRefs) -> PageRefs:
        """Where these pages are in the buffer, int64 (n,)."""
        return flat_slots(refs, self.num_pages) - self._first_page

    def fill_nan(self, indices: npt.NDArray[np.int64]) -> None:
        """Poison freed pages, so that a read of one shows."""
        if len(indices):
            data = self.buffer.data
            nan = float("nan") if data.is_floating_point() else 0xFF  # scales of ones are NaN
            own = slice(*self.buffer.head_groups)
            data[torch.from_numpy(indices.copy()).to(data.device), own] = nan

    def read(self, ref: PageRef) -> bytes:
        """A copy of a page's bytes, whoever owns it."""
        return self.read_page(int(self.indices(np.array([ref]))[0]))

    def read_page(self, index: int) -> bytes:
        """A copy of one page's bytes, for audits."""
        page = self.buffer.data[self._checked(index)].cpu().contiguous()
        return page.view(torch.uint8).numpy().tobytes()

    def write_page(self, index: int, data: bytes) -> None:
        """Overwrite one page with bytes that `read_page` returned."""
        page = self.buffer.data[self._checked(index)]
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        page.copy_(raw.view(page.dtype).view(page.shape))

    def _checked(self, index: int) -> int:
        count = self.num_owners * self.num_pages
        assert 0 <= index < count, f"slot {index} is outside a pool of {count}"
        return index


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU untouched memory but for what is populated ahead."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, dtype=np.uint8)  # calloc; torch's is a memset
    populate(raw)
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)
