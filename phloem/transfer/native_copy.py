"""Copies of parts of pages by the native library: one call, in which the GIL is not held."""

from __future__ import annotations

import ctypes as c

import numpy as np
import numpy.typing as npt

from phloem.core.errors import ConfigError
from phloem.kernels.native_abi import library
from phloem.kv.layout import PageLayout

__all__ = ["SegmentCopy"]

_Slots = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


class _Segments(c.Structure):
    """Mirrors phloem_segments of csrc/cpu/phloem_cpu.h."""

    _fields_ = (
        ("num_pages", c.c_int64),
        ("page_bytes", c.c_int64),
        ("num_segments", c.c_int64),
        ("segment_stride", c.c_int64),
        ("offset", c.c_int64),
        ("segment_bytes", c.c_int64),
    )


class SegmentCopy:
    """Whole pages or some layers of them, between two pools (P, G, L, bytes) of one layout."""

    def __init__(self, layout: PageLayout) -> None:
        self._function = library().phloem_copy_segments
        self._page_bytes = layout.spec.page_bytes
        self._num_groups = layout.num_head_groups
        self._num_layers = layout.spec.num_layers

    @staticmethod
    def available() -> bool:
        """Whether the library is built, and knows how."""
        try:
            return hasattr(library(), "phloem_copy_segments")
        except ConfigError:
            return False

    def copy(
        self,
        to: _Bytes,
        source: _Bytes,
        to_slots: _Slots,
        slots: _Slots,
        layers: range | None = None,
    ) -> None:
        """Copy `layers` (all of them by default) of source[slots] to to[to_slots]."""
        assert len(to_slots) == len(slots), "pages go in pairs"
        _check(to_slots, len(to))
        _check(slots, len(source))
        segments = self._whole(len(slots))
        if layers is not None and len(layers) < self._num_layers:
            segments = self._some(len(slots), layers)
        there, here = np.ascontiguousarray(to_slots), np.ascontiguousarray(slots)
        status = self._function(
            c.c_void_p(to.ctypes.data),
            c.c_void_p(source.ctypes.data),
            c.c_void_p(there.ctypes.data),
            c.c_void_p(here.ctypes.data),
            c.byref(segments),
        )
        assert status == 0, f"copy_segments refused its arguments ({status})"

    def _whole(self, count: int) -> _Segments:
        size = self._page_bytes
        return _Segments(count, size, 1, size, 0, size)

    def _some(self, count: int, layers: range) -> _Segments:
        group = self._page_bytes // self._num_groups
        layer = group // self._num_layers
        return _Segments(
            count,
            self._page_bytes,
            self._num_groups,
            group,
            layers.start * layer,
            len(layers) * layer,
        )


def _check(slots: _Slots, num_pages: int) -> None:
    """C would not notice a slot outside the pool."""
    assert len(slots) == 0 or (slots.min() >= 0 and slots.max() < num_pages), (
        f"slots {slots.min()} ... {slots.max()} of a pool of {num_pages}"
    )
