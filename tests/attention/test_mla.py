"""Latent attention over pages: absorbed and expanded, against the definition, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phloem.attention import MLAAttention, MLAReferenceAttention, RaggedBatch, RowSpan, gather_plan
from phloem.attention import mla as mla_module
from phloem.attention.mla import Way, cheaper_way
from phloem.config.mla import MLAConfig
from phloem.kernels import Scoring, TorchOps
from phloem.kernels.reference import ReferenceOps
from phloem.kv.layout import PageLayout
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.pools import DevicePool
from tests.attention.test_paged import NUM_PAGES, random_batch
from tests.long import checkered

HEADS, LAYERS = 3, 2
SIZES = MLAConfig(kv_rank=32, q_rank=None, nope_dim=12, rope_dim=16, v_dim=10)
WIDE = MLAConfig(kv_rank=16, q_rank=None, nope_dim=8, rope_dim=16, v_dim=40)  # v beyond a key
V3 = MLAConfig(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, v_dim=128)
SCORING = Scoring(0.3)


def make_pool(mla: MLAConfig, page_size: int, dtype: KVDtype = KVDtype.FP32) -> DevicePool:
    spec = KVSpec(
        kind=AttentionKind.MLA,
        dtype=dtype,
        num_layers=LAYERS,
        num_kv_heads=1,
        head_dim=mla.row_dim,
        rope_dim=mla.rope_dim,
        page_size=page_size,
    )
    layout = PageLayout(spec, NUM_PAGES, 1)
    pool = DevicePool(layout, device=torch.device("cpu"), dtype=torch.float32)
    pool.fill_nan(np.arange(NUM_PAGES))
    return pool


def fill_earlier(pool: DevicePool, batch: RaggedBatch) -> None:
    """Write random rows at every position before the spans, and nowhere else."""
    size, width = batch.page_size, pool.layout.spec.head_dim
    for span in batch.spans:
        for pos in range(span.start):
            rows = pool.buffer.encode(torch.randn(LAYERS, width))
            pool.buffer.data[span.slots[pos // size], 0, :, 0, pos % size, 0] = rows


def weights(mla: MLAConfig) -> list[torch.Tensor]:
    return [0.3 * torch.randn(HEADS * mla.up_dim, mla.kv_rank) for _ in range(LAYERS)]


def inputs(mla: MLAConfig, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, HEADS, mla.nope_dim + mla.rope_dim), torch.randn(
        count, 1, mla.row_dim
    )


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are so small that a second thread only waits for its turn."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_batches(page_size: int) -> list[tuple[MLAConfig, RaggedBatch]]:
    return [
        (mla, random_batch(np.random.default_rng([page_size, seed]), page_size))
        for mla, seed in ((SIZES, 1), (WIDE, 2))
    ]


@pytest.mark.parametrize(
    ("way", "page_size", "dtype"), checkered([*Way, None], [1, 4, 16], list(KVDtype)), ids=str
)
def test_both_ways_equal_the_definition(way, page_size, dtype, monkeypatch):
    check_against_the_definition(way, page_size, dtype, TorchOps(), monkeypatch)


@pytest.mark.parametrize("way", list(Way), ids=lambda w: w.value)
def test_the_reference_ops_agree_as_well(way, monkeypatch):
    check_against_the_definition(way, 4, KVDtype.FP32, ReferenceOps(), monkeypatch)


def check_against_the_definition(way, page_size, dtype, ops, monkeypatch):
    """In blocks of 13 earlier tokens and runs of 5 expanded ones; every slot that holds no token
    of a row is NaN, and none of it is seen."""
    monkeypatch.setattr(gather_plan, "CONTEXT_BLOCK_TOKENS", 13)
    monkeypatch.setattr(mla_module, "EXPANDED_BYTES", 0)
    monkeypatch.setattr(mla_module, "LEAST_RUN_TOKENS", 5)
    torch.manual_seed(page_size)
    for mla, batch in random_batches(page_size):
        pools = [make_pool(mla, page_size, dtype) for _ in range(2)]
        fill_earlier(pools[0], batch)
        pools[1].buffer.data.copy_(pools[0].buffer.data)
        up = weights(mla)
        fast = MLAAttention(pools[0].buffer, ops, mla=mla, up=up, scoring=SCORING, way=way)
        slow = MLAReferenceAttention(pools[1].buffer, mla=mla, up=up, scoring=SCORING)
        for layer in range(LAYERS):
            q, rows = inputs(mla, batch.num_tokens)
            args = (layer, q, rows, rows[..., : mla.kv_rank])
            got, want = (a.run(*args, a.plan(batch)) for a in (fast, slow))
            assert got.shape == (batch.num_tokens, HEADS * mla.v_dim)
            assert float((got - want).abs().max()) < 5e-6 * max(1.0, float(want.abs().max()))
        assert torch.equal(*(pool.buffer.data.view(torch.uint8) for pool in pools))


def test_what_is_kept_is_read_and_not_written():
    """Rows below `write_from` stay as they are; queries there see them and not their own."""
    torch.manual_seed(0)
    pool, slots = make_pool(SIZES, 4), np.arange(9, dtype=np.int64)
    up = weights(SIZES)
    attention = MLAAttention(pool.buffer, TorchOps(), mla=SIZES, up=up, scoring=SCORING)
    q, rows = inputs(SIZES, 23)

    def run(row: torch.Tensor, low: int, high: int, write_from: int = 0) -> torch.Tensor:
        span = RowSpan(0, low, high - low, slots, write_from=write_from)
        plan = attention.plan(RaggedBatch((span,), 4))
        part = row[low:high]
        return attention.run(0, q[low:high], part, part[..., :32], plan)

    run(rows, 0, 12)
    before = pool.buffer.data[:3].clone()
    want = run(rows, 5, 23)
    wrong = rows.clone()
    wrong[:12] = torch.nan
    assert torch.equal(run(wrong, 5, 23, write_from=12), want)
    assert torch.equal(pool.buffer.data[:3, :, 0], before[:, :, 0])


@pytest.mark.parametrize("dtype", [d for d in KVDtype if d.is_packed], ids=lambda d: d.value)
def test_a_chunk_sees_its_own_rows_as_its_page_holds_them(dtype):
    """Not as they were computed: a cold prefill must equal one that reads them later."""
    torch.manual_seed(0)
    up, (q, rows) = weights(SIZES), inputs(SIZES, 12)
    pool, plain = make_pool(SIZES, 4, dtype), make_pool(SIZES, 4)
    held = pool.buffer.decode(pool.buffer.encode(rows))
    outs = []
    for where, given in ((pool, rows), (plain, held), (plain, rows)):
        attention = MLAAttention(where.buffer, TorchOps(), mla=SIZES, up=up, scoring=SCORING)
        batch = RaggedBatch((RowSpan(0, 0, 12, np.arange(3)),), 4)
        outs.append(attention.run(0, q, given, given[..., :32], attention.plan(batch)))
    assert torch.equal(outs[0], outs[1])
    assert float((outs[0] - outs[2]).abs().max()) > 1e-3


def test_which_way_is_cheaper():
    """At V3's sizes: decodes and short chunks on long prefixes absorb, chunks of themselves and
    long ones do not. The border is where 2 x (576 - 192) products a pair cost a row's expansion."""
    own = cheaper_way(V3, queries=512, keys=512, pairs=512 * 256)
    assert own is Way.EXPANDED
    for queries in (1, 64, 160):
        assert cheaper_way(V3, queries=queries, keys=8192, pairs=queries * 8192) is Way.ABSORBED
    for queries in (200, 4096):
        assert cheaper_way(V3, queries=queries, keys=8192, pairs=queries * 8192) is Way.EXPANDED


def test_runs_of_expanded_keys_stay_within_their_memory(monkeypatch):
    """128 heads of V3 over 1,000 keys: never K and V of all of them at once."""
    seen = []
    expand = MLAAttention._expand

    def watch(self, rows, up):
        seen.append(len(rows))
        return expand(self, rows, up)

    monkeypatch.setattr(MLAAttention, "_expand", watch)
    small = MLAConfig(kv_rank=32, q_rank=None, nope_dim=128, rope_dim=64, v_dim=128)
    pool = make_pool(small, 16)
    up = [torch.randn(16 * small.up_dim, 32)] * LAYERS
    attention = MLAAttention(
        pool.buffer, TorchOps(), mla=small, up=up, scoring=SCORING, way=Way.EXPANDED
    )
    monkeypatch.setattr(mla_module, "EXPANDED_BYTES", 300 * 16 * (256 + 2 * 192) * 4)
    batch = RaggedBatch((RowSpan(0, 0, 1000, np.arange(63)),), 16)
    rows = torch.randn(1000, 1, small.row_dim)
    q = torch.randn(1000, 16, 192)
    attention.run(0, q, rows, rows[..., :32], attention.plan(batch))
    assert seen == [300, 300, 300, 100]
