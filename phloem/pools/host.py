"""The host arena: all host pages of this machine, allocated once, in the layout of `kv/layout.py`.

It is a memfd, so that ranks of one machine can map the same memory by its descriptor, whatever the
size of /dev/shm.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

from phloem.core.errors import ConfigError
from phloem.core.store import Arena, Span
from phloem.kv.layout import PageLayout

__all__ = ["HostArena"]


class HostArena:
    """`layout.num_pages` pages of zeros, backed by memory from the start; `arena_id` tells the
    arenas of a model's components apart. Pages without bytes take no memory.

    Knows no free list: the control plane has it. Raises ConfigError if the memory is not there.
    """

    def __init__(self, layout: PageLayout, *, arena_id: int = 0) -> None:
        self.layout = layout
        self._id = arena_id
        size = layout.total_bytes
        self.fd = os.memfd_create("phloem-host", os.MFD_CLOEXEC)
        try:
            # Reserved now: a later SIGBUS in the middle of a copy could not be handled.
            os.posix_fallocate(self.fd, 0, size or 1)
            self._map = mmap.mmap(self.fd, size or 1)  # a map has at least one byte
        except OSError as error:
            os.close(self.fd)
            raise ConfigError(
                f"cannot allocate {size:,} bytes of host KV pages ({error.strerror}); "
                "lower --host-memory"
            ) from error
        self._close_fd = weakref.finalize(self, os.close, self.fd)
        with contextlib.suppress(OSError):  # an old kernel: pages are mapped one by one
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._populate()
        # (P, G, L, bytes of one layer of one head group)
        spec = layout.spec
        layer_bytes = layout.object_bytes // max(1, spec.num_layers)
        shape = (layout.num_pages, layout.num_head_groups, spec.num_layers, layer_bytes)
        self._view = memoryview(self._map)[:size]
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._view, dtype=np.uint8).reshape(shape)

    def _populate(self) -> None:
        """Map every page before the first copy would have to."""
        populate_write = 23  # MADV_POPULATE_WRITE, Linux 5.14; Python has no name for it
        with contextlib.suppress(OSError):
            self._map.madvise(populate_write)

    @property
    def num_pages(self) -> int:
        return self.layout.num_pages

    @property
    def num_bytes(self) -> int:
        return self.layout.total_bytes

    def arena(self) -> Arena:
        """The registered buffer as stores see it."""
        return Arena(self._id, self._view)

    def span(self, slot: int, head_group: int) -> Span:
        """Where one object (a head group of a page) lies."""
        offset = self.layout.object_offset(self._checked(slot), head_group)
        return Span(self._id, offset, self.layout.object_bytes)

    def read_page(self, slot: int) -> bytes:
        """A copy of one page's bytes, for audits."""
        data: bytes = self.bytes[self._checked(slot)].tobytes()
        return data

    def write_page(self, slot: int, data: bytes) -> None:
        """Overwrite one page, for tests."""
        page = self.bytes[self._checked(slot)]
        page[...] = np.frombuffer(data, dtype=np.uint8).reshape(page.shape)

    def poison(self, slots: npt.NDArray[np.int64]) -> None:
        """Fill freed pages with ones (NaN in every float type), so that a read of one shows."""
        self.bytes[slots] = 0xFF

    def close(self) -> None:
        """Give the memory back as soon as the last view of it is gone. Idempotent."""
        self._close_fd()

    def _checked(self, slot: int) -> int:
        assert 0 <= slot < self.num_pages, f"slot {slot} is outside an arena of {self.num_pages}"
        return slot
