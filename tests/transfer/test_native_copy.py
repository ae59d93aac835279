"""The native copy, whichever way it takes: through the caches or past them."""

from __future__ import annotations

import numpy as np
import pytest

from phloem.kv.layout import PageLayout
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.transfer.native_copy import SegmentCopy

NUM_PAGES, NUM_LAYERS = 200, 4

pytestmark = pytest.mark.skipif(not SegmentCopy.available(), reason="the library is not built")


def pool_of(size: int, shift: int, rng: np.random.Generator) -> np.ndarray:
    """Random bytes, at an address that is `shift` past a multiple of 64."""
    raw = rng.integers(0, 256, size + 128, dtype=np.uint8)
    start = -raw.ctypes.data % 64 + shift
    return raw[start : start + size]


@pytest.mark.parametrize("num_moved", [3, 150])  # small, and so much that it is streamed
@pytest.mark.parametrize("layers", [None, range(1, 3)])
@pytest.mark.parametrize(("to_shift", "from_shift"), [(0, 0), (4, 0), (0, 12), (36, 52)])
def test_every_byte_arrives_and_none_beside_it(num_moved, layers, to_shift, from_shift):
    """Odd sizes at odd addresses, against numpy: heads, lines and tails of each run."""
    spec = KVSpec(
        kind=AttentionKind.GQA,
        dtype=KVDtype.BF16,
        num_layers=NUM_LAYERS,
        num_kv_heads=3,
        head_dim=74,
        page_size=11,
    )
    layout = PageLayout(spec, NUM_PAGES, 3)
    shape = (NUM_PAGES, 3, NUM_LAYERS, -1)
    rng = np.random.default_rng(num_moved + to_shift)
    assert spec.page_bytes // (3 * NUM_LAYERS) % 64, "runs of whole lines would prove little"
    assert num_moved < 100 or num_moved * spec.page_bytes // 2 > 2 << 20, "not streamed"
    to = pool_of(layout.total_bytes, to_shift, rng).reshape(shape)
    source = pool_of(layout.total_bytes, from_shift, rng).reshape(shape)
    there, here = rng.permutation(NUM_PAGES)[:num_moved], rng.permutation(NUM_PAGES)[:num_moved]
    part = slice(None) if layers is None else slice(layers.start, layers.stop)
    want = to.copy()
    want[there, :, part] = source[here, :, part]
    SegmentCopy(layout).copy(to, source, there, here, layers)
    assert np.array_equal(to, want)
