"""The device pool: bytes lie as `kv/layout.py` says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phloem.kv.layout import PageLayout
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.pools import DevicePool, HostArena


def make_pool(dtype: KVDtype) -> DevicePool:
    spec = KVSpec(
        kind=AttentionKind.GQA, dtype=dtype, num_layers=3, num_kv_heads=4, head_dim=16, page_size=5
    )
    return DevicePool(PageLayout(spec, 7, 2), device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", list(KVDtype), ids=lambda d: d.value)
def test_a_page_is_the_bytes_of_its_objects_in_layout_order(dtype):
    pool = make_pool(dtype)
    pool.buffer.data.view(torch.uint8).random_()
    flat = pool.buffer.data.view(torch.uint8).numpy().tobytes()
    layout = pool.layout
    for slot in range(layout.num_pages):
        low = layout.object_offset(slot, 0)
        assert pool.read_page(slot) == flat[low : low + layout.spec.page_bytes]
        second = layout.object_offset(slot, 1) - low
        group = pool.buffer.data[slot, 1].view(torch.uint8).numpy().tobytes()
        assert pool.read_page(slot)[second:] == group


@pytest.mark.parametrize("dtype", list(KVDtype), ids=lambda d: d.value)
def test_pages_round_trip_as_bytes(dtype):
    pool = make_pool(dtype)
    pool.buffer.data[:-1].view(torch.uint8).random_()
    data = pool.read_page(2)
    pool.write_page(5, data)
    assert pool.read_page(5) == data
    assert pool.read_page(4) != data


@pytest.mark.parametrize("dtype", list(KVDtype), ids=lambda d: d.value)
def test_nan_fill_touches_the_named_pages_only(dtype):
    """And it is as NaN that they are read, also where they hold codes."""
    pool = make_pool(dtype)
    pool.fill_nan(np.array([1, 4]))
    pool.fill_nan(np.array([], dtype=np.int64))
    bad = pool.buffer.decode(pool.buffer.data).isnan().flatten(1)
    assert bad.all(dim=1).tolist() == [slot in (1, 4) for slot in range(8)]
    assert bad.any(dim=1).tolist() == [slot in (1, 4) for slot in range(8)]


@pytest.mark.parametrize("slot", [-1, 7])
def test_a_slot_outside_the_pool_is_a_bug(slot):
    """Slot 7 exists in the tensor: it is the page of zeros, which nobody may write."""
    with pytest.raises(AssertionError, match="outside a pool"):
        make_pool(KVDtype.FP32).write_page(slot, b"")


def test_pages_begin_where_the_host_arenas_do_within_four_kib():
    """Else copies between them are four times slower (the processor's 4 KiB aliasing)."""
    pool = make_pool(KVDtype.BF16)
    arena = HostArena(pool.layout)
    assert (pool.buffer.data.data_ptr() - arena.bytes.ctypes.data) % 4096 == 0
