"""The device pool: all KV pages of one rank, in the byte layout of `kv/layout.py`."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from phloem.core.errors import ConfigError
from phloem.kernels import KVBuffer, make_codec
from phloem.kernels.codec import torch_dtype
from phloem.kv.layout import PageLayout

__all__ = ["DevicePool", "torch_dtype"]

# As the host arena: a copy to a place a little higher within its 4 KiB takes four times as long,
# since the processor takes its loads to depend on the stores just before them.
_ALIGNMENT = 4096


class DevicePool:
    """One flat tensor of `layout.num_pages` pages, and one page of zeros for padding after them.

    Pages start as zeros. It knows no owner and no free list: the control plane has them. `dtype`:
    what K and V are computed in, and read as; None: as they are stored, or fp32 if they are packed.
    """

    def __init__(
        self, layout: PageLayout, *, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        self.layout = layout
        shape = (layout.num_pages + 1, *layout.shape[1:])
        try:
            data = _zeros(shape, torch_dtype(layout.spec.dtype), device)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"cannot allocate {layout.total_bytes:,} bytes of KV pages on {device}; "
                "lower the KV memory"
            ) from error
        unpacked = torch.float32 if layout.spec.dtype.is_packed else data.dtype
        self.buffer = KVBuffer(data, make_codec(layout.spec, dtype or unpacked))

    @property
    def num_pages(self) -> int:
        return self.layout.num_pages

    def fill_nan(self, slots: npt.NDArray[np.int64]) -> None:
        """Poison freed pages, so that a read of one shows."""
        if len(slots):
            data = self.buffer.data
            nan = float("nan") if data.is_floating_point() else 0xFF  # scales of ones are NaN
            data[torch.from_numpy(slots.copy()).to(data.device)] = nan

    def read_page(self, slot: int) -> bytes:
        """A copy of one page's bytes, for audits."""
        page = self.buffer.data[self._checked(slot)].cpu().contiguous()
        return page.view(torch.uint8).numpy().tobytes()

    def write_page(self, slot: int, data: bytes) -> None:
        """Overwrite one page with bytes that `read_page` returned."""
        page = self.buffer.data[self._checked(slot)]
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        page.copy_(raw.view(page.dtype).view(page.shape))

    def _checked(self, slot: int) -> int:
        assert 0 <= slot < self.num_pages, f"slot {slot} is outside a pool of {self.num_pages}"
        return slot


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU as untouched memory, so that a page costs memory from its first use on."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, dtype=np.uint8)  # calloc; torch's is a memset
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)
