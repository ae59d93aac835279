"""Rows of ranks that divide a model, under the whole engine: every journey equals one cold rank.

Ranks are threads. Freed pages are NaN, filled by whoever holds them; every rank's copy of the cache
is compared with the leader's in every step.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from phloem.core.mesh import Mesh, ShardAxis
from phloem.core.remote import Remote, RemoteWays
from phloem.kv.sizing import least_window_pages
from phloem.models.row import Row
from phloem.tiers import TierConfig
from phloem.worker.inputs import RankShare
from tests.kernels.native_build import native_library
from tests.models.checkpoints import make_wide
from tests.parity.come_and_go import come_and_go
from tests.parity.conftest import Models, Windowed
from tests.parity.exact import check_exact, sum_row_by_row
from tests.parity.rig import Cold, Rig, check_all
from tests.parity.test_dtypes import journey, shape_of
from tests.parity.test_journeys import words
from tests.parity.test_tiers import chat

# (kind, tp, cp, way, kernels): "llama-tied" has 4 KV heads, and a head that is the embedding.
MESHES = [
    ("llama", 2, 2, "gather_kv", "torch"),
    ("llama-tied", 4, 1, "send_q", "torch"),
    ("llama-tied", 2, 2, "direct", "torch"),
    ("qwen3", 2, 2, "send_q", "torch"),
    ("v3-halves", 2, 2, "direct", "torch"),
    ("v2-lite", 4, 1, "gather_kv", "torch"),
    ("v3-yarn", 2, 1, "send_q", "torch"),
    ("v3", 2, 2, "send_q", "torch"),
]
WAIT = TierConfig(prefetch_policy="wait_complete")


@pytest.mark.parametrize(("kind", "tp", "cp", "way", "kernels"), MESHES, ids=str)
def test_requests_that_come_and_go_over_a_small_pool(
    models: Models, kind: str, tp: int, cp: int, way: str, kernels: str
) -> None:
    path, rng = models(kind), random.Random(f"{kind} {tp} {cp}")
    cold = Cold(path)
    with Rig(
        path,
        page_size=4,
        num_pages=60,
        max_prefill_tokens=20,
        max_running=4,
        ranks=cp,
        tp=tp,
        remote=RemoteWays.all(Remote(way)),
        kernels=kernels,
    ) as rig:
        come_and_go(rig, rng, 12)
        check_all(rig, cold)


STORED = [
    ("llama", Mesh(), Mesh(tp=2)),
    ("llama-tied", Mesh(tp=2, cp=2), Mesh(tp=4)),
    ("v3", Mesh(tp=2, cp=2), Mesh()),
    ("v3", Mesh(cp=2), Mesh(tp=2)),
]


@pytest.mark.parametrize(("kind", "writer", "reader"), STORED, ids=str)
def test_what_one_mesh_has_stored_another_one_reads(
    models: Models, tmp_path: Path, kind: str, writer: Mesh, reader: Mesh
) -> None:
    """Through host and storage: pages are whole ones, and name neither axis."""
    path = models(kind)
    cold = Cold(path)
    for engine in (writer, reader):
        with Rig(
            path,
            page_size=4,
            num_pages=24,
            host_pages=120,
            ranks=engine.cp,
            tp=engine.tp,
            store=tmp_path,
            tiers=WAIT,
        ) as rig:
            chat(rig, 50, 8)
            sources = [answer.sources for answer in rig.answers.values()]
            assert sum(each.host for each in sources) > 0
            if engine is reader:
                assert sum(each.storage for each in sources) > 0
            check_all(rig, cold)


WINDOWS = [("mistral", 4, 2, 1), ("gemma3", 8, 2, 2), ("gpt_oss", 8, 2, 2)]


@pytest.mark.parametrize(("family", "window", "tp", "cp"), WINDOWS, ids=str)
def test_windows(windowed: Windowed, family: str, window: int, tp: int, cp: int) -> None:
    """Tails go to the host and come back; sinks, output biases and post norms are whole."""
    path, cold = windowed(family, window)
    with Rig(
        path,
        page_size=4,
        num_pages=40,
        window_pages=cp * (least_window_pages(window, 4) + 2),
        host_pages=160,
        window_host_pages=80,
        ranks=cp,
        tp=tp,
    ) as rig:
        chat(rig, 50, 5)
        check_all(rig, cold)


EXACT = [
    # `test_rank_matrix.py` has heads of every dtype.
    pytest.param("llama", "int8", 2, 1, marks=pytest.mark.long),
    pytest.param("llama-tied", "fp8", 2, 2, marks=pytest.mark.long),
    pytest.param("llama-tied", "fp4", 4, 1, marks=pytest.mark.long),
    ("v3", "int8", 2, 2),
    ("gpt_oss", "bf16", 2, 1),
]


@pytest.mark.parametrize(("kind", "dtype", "tp", "cp"), EXACT, ids=str)
def test_bytes_after_every_journey_are_those_of_the_row_that_computed_them(
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    kind: str,
    dtype: str,
    tp: int,
    cp: int,
) -> None:
    """To the last bit, in every page dtype: a cold row of the same tp, whose sums are the same."""
    sum_row_by_row(monkeypatch)
    path, shape = models(kind), shape_of(dtype, 4, 2)
    cold = Cold(path, tp=tp, kernels="reference", kv_dtype=dtype)
    shape |= {"host_pages": 96, "tiers": WAIT, "num_pages": 24}
    with Rig(path, **shape, store=tmp_path, ranks=cp, tp=tp) as rig:
        history = journey(rig, words(1, 14), 3)
        assert sum(a.sources.device for a in rig.answers.values()) > 0
        assert check_exact(rig, cold) > 0
    with Rig(path, **shape, store=tmp_path, ranks=cp, tp=tp) as rig:
        answer = rig.ask(history, 3)
        assert answer.sources.storage > 0
        rig.cache.evict(rig.cache.evictable_pages)
        assert rig.ask(history + answer.tokens + words(99, 3), 2).sources.host > 0
        assert check_exact(rig, cold) > 0
    cold.close()


def test_a_row_of_processes(models: Models) -> None:
    """Seeded requests over a small pool: freed pages are NaN in both, digests are compared in every
    step, and the core is given away at random."""
    path, rng = models("llama"), random.Random(8)
    with Rig(
        path,
        page_size=4,
        num_pages=30,
        host_pages=96,
        max_prefill_tokens=24,
        max_running=4,
        tp=2,
        processes=True,
    ) as rig:
        heads = [words(rng.randrange(999), rng.randrange(8, 24)) for _ in range(3)]
        for i in range(14):
            rig.add(rng.choice(heads) + words(i, rng.randrange(1, 16)), rng.randrange(1, 30))
            for _ in range(rng.randrange(8)):
                rig.loop.step()
        rig.loop.run_until_idle()
        assert rig.cache.leader.evicted_pages > 0
        assert sum(answer.cached for answer in rig.answers.values()) > 0
        check_all(rig, Cold(path))


@pytest.mark.parametrize(
    ("kind", "cp", "way"),
    [
        ("llama", 1, "direct"),
        ("gemma3", 2, "gather_kv"),
        ("gpt_oss", 2, "direct"),
        ("v2-lite", 1, "direct"),
        ("v3", 2, "send_q"),
        ("v3-yarn", 2, "gather_kv"),
    ],
)
def test_native_kernels_compute_a_part_of_a_layer(
    tmp_path: Path, kind: str, cp: int, way: str
) -> None:
    """An MLP wide enough that half of it is whole panels; biases and post norms come once."""
    native_library()
    windowed = make_wide(kind, tmp_path)
    windows = {"window_pages": 30, "window_host_pages": 80} if windowed else {}
    cold = Cold(tmp_path)
    with Rig(
        tmp_path,
        page_size=4,
        num_pages=40,
        host_pages=160,
        ranks=cp,
        tp=2,
        kernels="native",
        remote=RemoteWays.all(Remote(way)),
        **windows,
    ) as rig:
        chat(rig, 40, 4)
        check_all(rig, cold)


def test_a_summand_that_is_left_out_is_noticed(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above would miss if they compared too little."""
    monkeypatch.setattr(Row, "add_up", lambda _self, summand: summand)
    with Rig(models("llama"), page_size=4, num_pages=40, tp=2) as rig:
        rig.ask(words(1, 20), 3)
        with pytest.raises(AssertionError):
            check_all(rig, Cold(models("llama")))


def test_a_latent_that_nobody_writes_is_noticed(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank of a row believes that the pages of the other one are its own."""
    own = RankShare.of_owner

    def swapped(owner: int, axis: ShardAxis, pages: int) -> RankShare:
        share = own(owner, axis, pages)
        assert share.kept is not None
        return replace(share, kept=(share.kept[1], share.kept[1] + pages))

    monkeypatch.setattr(RankShare, "of_owner", swapped)
    with Rig(models("v3"), page_size=4, num_pages=40, tp=2) as rig:
        rig.ask(words(1, 20), 3)
        with pytest.raises(AssertionError):
            check_all(rig, Cold(models("v3")))
