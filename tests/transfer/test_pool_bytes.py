"""Pages as bytes that travel: the same in plain memory and by the way of a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phloem.kv.spec import KVDtype
from phloem.pools import DevicePool
from phloem.transfer.pool_bytes import PoolBytes
from tests.transfer.rig import NUM_LAYERS, layout

SLOTS = np.array([5, 0, 3], dtype=np.int64)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "tensor"])
@pytest.mark.parametrize("dtype", list(KVDtype), ids=lambda d: d.value)
def test_pages_are_the_pools_bytes_and_layers_go_where_they_belong(
    dtype: KVDtype, plain: bool
) -> None:
    pool = DevicePool(layout(6, dtype), device=torch.device("cpu"))
    rng = np.random.default_rng(len(dtype.value))
    pages = rng.integers(0, 256, (6, pool.layout.spec.page_bytes), dtype=np.uint8)
    for slot in range(6):
        pool.write_page(slot, pages[slot].tobytes())
    made = PoolBytes(pool)
    if not plain:
        made._plain = None
    held = made.read(SLOTS)
    assert held.tobytes() == pages[SLOTS].tobytes()
    data = rng.integers(0, 256, made.room(3, NUM_LAYERS - 1).shape, dtype=np.uint8)
    made.write(SLOTS, 1, data)
    wanted = pages.reshape(6, *held.shape[1:])
    wanted[SLOTS, :, 1:] = data
    assert [pool.read_page(slot) for slot in range(6)] == [page.tobytes() for page in wanted]
    for outside in (-1, 6):  # behind the last page is one of zeros
        with pytest.raises(AssertionError, match="of a pool of 6"):
            made.read(np.array([outside]))
