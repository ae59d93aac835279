"""Copies of pages between the device pool and the host arena.

Both have the same layout, so a page is one run of bytes; layers first ... last of it are one run in
each head group. Slots are int64 (n,), page i goes between device[i] and host[i].
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from phloem.pools import DevicePool, HostArena
from phloem.transfer.native_copy import SegmentCopy
from phloem.transfer.pool_bytes import PoolBytes

__all__ = ["Copier", "CpuCopier", "CudaCopier", "NoBytes", "PartCopier", "make_copier"]

_Slots = npt.NDArray[np.int64]


class Copier(Protocol):
    """Blocking copies; the GIL is not held while bytes move."""

    def to_host(self, device: _Slots, host: _Slots) -> None:
        """Whole pages."""
        ...

    def to_device(self, device: _Slots, host: _Slots, first_layer: int, end_layer: int) -> None:
        """Layers first_layer ... end_layer - 1 of pages."""
        ...


class NoBytes:
    """Of pages without bytes: the spine of a model all of whose layers have a window."""

    def to_host(self, device: _Slots, host: _Slots) -> None:
        """Nothing to copy."""

    def to_device(self, device: _Slots, host: _Slots, first_layer: int, end_layer: int) -> None:
        """Nothing to copy."""


class CpuCopier:
    """Plain memory on both sides; one call into C a chunk, or a page where it is not built."""

    def __init__(self, pool: DevicePool, arena: HostArena, *, native: bool = True) -> None:
        data = pool.buffer.data
        assert data.is_contiguous(), "a page pool is one flat tensor"
        self._num_layers = int(data.shape[2])
        shape = (data.shape[0], data.shape[1], self._num_layers, -1)
        self._device = data.view(torch.uint8).numpy().reshape(shape)
        self._host = arena.bytes
        self._native = SegmentCopy(arena.layout) if native and SegmentCopy.available() else None

    def to_host(self, device: _Slots, host: _Slots) -> None:
        if self._native is not None:
            self._native.copy(self._host, self._device, host, device)
            return
        for start, end in _runs(device, host):
            length, first, to = end - start, int(device[start]), int(host[start])
            np.copyto(self._host[to : to + length], self._device[first : first + length])

    def to_device(self, device: _Slots, host: _Slots, first_layer: int, end_layer: int) -> None:
        layers = range(first_layer, end_layer)
        if self._native is not None:
            self._native.copy(self._device, self._host, device, host, layers)
            return
        part = slice(first_layer, end_layer)
        for to, first in zip(device.tolist(), host.tolist(), strict=True):
            np.copyto(self._device[to, :, part], self._host[first, :, part])


class PartCopier:
    """Of a pool, in whatever memory, that holds the first head groups of each page alone."""

    def __init__(self, pool: DevicePool, arena: HostArena) -> None:
        self._pool = PoolBytes(pool)
        self._host = arena.bytes[:, : pool.layout.num_head_groups]

    def to_host(self, device: _Slots, host: _Slots) -> None:
        self._host[host] = self._pool.read(device)

    def to_device(self, device: _Slots, host: _Slots, first_layer: int, end_layer: int) -> None:
        self._pool.write(device, first_layer, self._host[host, :, first_layer:end_layer])


class CudaCopier:
    """Pinned host memory and a stream of its own; returns when the bytes have arrived."""

    def __init__(self, pool: DevicePool, arena: HostArena) -> None:
        self._device = pool.buffer.data
        host = torch.from_numpy(arena.bytes.reshape(-1)).view(self._device.dtype)
        self._host = host.view(arena.num_pages, *self._device.shape[1:])
        cuda: Any = torch.cuda  # its stubs are untyped
        # Where pinning is refused copies still work, only slower.
        cuda.cudart().cudaHostRegister(host.data_ptr(), arena.layout.total_bytes, 0)
        self._stream = cuda.Stream(device=self._device.device)

    def to_host(self, device: _Slots, host: _Slots) -> None:
        # The step that wrote the pages has been finished, but perhaps only on the host's side.
        self._stream.wait_stream(torch.cuda.default_stream(self._device.device))
        with torch.cuda.stream(self._stream):
            for start, end in _runs(device, host):
                length, first, to = end - start, int(device[start]), int(host[start])
                self._host[to : to + length].copy_(
                    self._device[first : first + length], non_blocking=True
                )
        self._stream.synchronize()

    def to_device(self, device: _Slots, host: _Slots, first_layer: int, end_layer: int) -> None:
        layers = slice(first_layer, end_layer)
        # The last step that may read what lies there has been finished, as above.
        self._stream.wait_stream(torch.cuda.default_stream(self._device.device))
        with torch.cuda.stream(self._stream):
            for start, end in _runs(device, host):
                length, to, first = end - start, int(device[start]), int(host[start])
                self._device[to : to + length, :, layers].copy_(
                    self._host[first : first + length, :, layers], non_blocking=True
                )
        self._stream.synchronize()


def make_copier(pool: DevicePool, arena: HostArena) -> Copier:
    """The copier for the pool's device, and for what the pool holds of a page."""
    if arena.layout.spec.page_bytes == 0:
        return NoBytes()
    if pool.layout.num_head_groups < arena.layout.num_head_groups:
        return PartCopier(pool, arena)
    if pool.buffer.data.device.type == "cuda":
        return CudaCopier(pool, arena)
    return CpuCopier(pool, arena)


def _runs(a: _Slots, b: _Slots) -> list[tuple[int, int]]:
    """Cut into runs (start, end) in which both sides count up by one."""
    if len(a) == 0:
        return []
    breaks = np.flatnonzero((np.diff(a) != 1) | (np.diff(b) != 1)) + 1
    borders = [0, *breaks.tolist(), len(a)]
    return list(itertools.pairwise(borders))
