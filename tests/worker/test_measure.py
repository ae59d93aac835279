"""What ranks measure of themselves and of the link between them, before the first step."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from phloem.core.errors import EngineDead
from phloem.core.remote import LinkRates
from phloem.groups import Link
from phloem.worker import load_local_ranks, runner
from phloem.worker.ranked import RankedWorker
from tests.kernels.native_build import native_library
from tests.models.checkpoints import LATENT, make_checkpoint, make_latent, make_windowed
from tests.worker.rank_driver import Logits, RankDriver, striped
from tests.worker.test_local_ranks import (
    PAGE,
    alone,
    check_same,
    driver,
    options,
    path,
    session,
)

__all__ = ["alone", "path"]


def test_ranks_that_were_measured_answer_as_before(path, alone) -> None:
    """What it has written into pages is nobody's. Every rank knows the same figures: the slowest
    one's."""
    ranks, logits = driver(path, 2, striped(2))
    ranks.worker.measure()
    session(ranks)
    ranks.worker.close()
    check_same(ranks, logits, alone)


def test_all_ranks_have_the_same_figures(path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[LinkRates] = []
    real = runner.measure_rates

    def noted(model, choice) -> LinkRates:
        rates = real(model, choice)
        seen.append(rates)
        return rates

    monkeypatch.setattr(runner, "measure_rates", noted)
    ranks, _ = driver(path, 3, striped(3))
    rates = ranks.worker.measure()
    ranks.step()  # which a rank begins when it has measured
    ranks.worker.close()
    assert seen == [rates] * 3
    assert rates.read_bytes_s > 0  # mapped
    assert min(rates.latency_s, rates.bytes_s, rates.linear_row_s, rates.pair_s) > 0


def test_the_link_is_what_is_measured(path) -> None:
    """A simulated one: never faster than it is, and not much slower."""
    link = Link(latency_s=0.002, bytes_s=100e6)
    loaded = load_local_ranks(path, options(), 2, link=link)
    rates = loaded.worker.measure()
    loaded.worker.close()
    assert 0.002 <= rates.latency_s < 0.05  # and what the software does around a message
    assert 20e6 < rates.bytes_s < 150e6


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral", "v2-lite"])
def test_models_of_all_kinds_are_measured(kind: str, tmp_path: Path) -> None:
    """Layers with windows, all of them or some, and latents; also where pages hold packed rows."""
    native_library()
    more = {}
    if kind in LATENT:
        make_latent(kind, tmp_path)
    elif kind == "llama":
        make_checkpoint(kind, tmp_path)
    else:
        make_windowed(kind, tmp_path, window=8)
        more = {"window_pages": 20}
    loaded = load_local_ranks(tmp_path, options(kv_dtype="int8", **more), 2)
    rates = loaded.worker.measure()
    loaded.worker.close()
    assert min(rates.linear_row_s, rates.pair_s, rates.memory_bytes_s) > 0


@pytest.mark.parametrize("comes", ["first", "last"])
def test_a_rank_that_cannot_measure_is_named(
    comes: str, path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what it says comes only after the others have seen it leave."""
    real, left = runner.measure_rates, threading.Event()

    def broken(model, choice):
        if choice.group.rank == 1:
            raise ValueError("broken on purpose")
        try:
            return real(model, choice)
        finally:
            left.set()

    def late(worker: RankedWorker, rank: int, message) -> None:
        assert left.wait(30)
        take(worker, rank, message)

    take = RankedWorker._take
    monkeypatch.setattr(runner, "measure_rates", broken)
    loaded = load_local_ranks(path, options(), 2)
    if comes == "last":
        monkeypatch.setattr(RankedWorker, "_take", late)
    with pytest.raises(EngineDead, match=r"^rank 1 failed: ValueError: broken on purpose"):
        loaded.worker.measure()
    loaded.worker.close()


def test_a_small_pool_is_enough(path) -> None:
    """The row's pages are the rank's own ones, over and over."""
    logits = Logits()
    loaded = load_local_ranks(path, options(num_pages=2), 2, hooks=logits.hooks)
    assert loaded.worker.measure().pair_s > 0
    ranks = RankDriver(loaded.worker, striped(2), size=2, num_pages=2, page_size=PAGE)
    ranks.admit(0, [5, 6, 7], room=4)
    ranks.step(ranks.chunk(0, [5, 6, 7], 0, 3))
    ranks.worker.close()
    assert logits.stacked(100).isfinite().all()
