"""Pairs: what a quad cancels, and what the interval says; and that the store bench runs at all."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from phloem.bench import stores
from phloem.bench.paired import Budget, median_interval, quad
from phloem.bench.store_rivals import FilePerPage, RawBlocks, Segments


@pytest.mark.parametrize("turn", [0, 1])
def test_a_steady_drift_cancels_within_a_quad(monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    """Every run takes 1 ms longer than the one before; the ratio is still that of the work."""
    now, drift = 0.0, 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def work(seconds: float) -> None:
        nonlocal now, drift
        now += seconds + drift
        drift += 0.001

    sample = quad(lambda: work(0.04), lambda: work(0.02), turn)
    assert sample.other_s == pytest.approx(0.083)
    assert sample.mine_s == pytest.approx(0.043)
    assert sample.ratio == pytest.approx(83 / 43)


def test_the_interval_of_a_median_holds_it_and_shrinks() -> None:
    few, many = list(range(1, 10)), [x / 100 for x in range(100, 1001)]
    for samples in (few, many):
        low, high = median_interval(samples)
        assert low < 5.5 < high
    assert median_interval(many)[1] - median_interval(many)[0] < 1
    assert median_interval([3.0]) == (3.0, 3.0)


def test_a_budget_keeps_its_fewest_and_its_most() -> None:
    assert list(Budget(seconds=0.0, fewest=3).turns()) == [0, 1, 2]
    assert list(Budget(seconds=60.0, most=2).turns()) == [0, 1]


@pytest.mark.parametrize("rival", ["raw", "files", "segments", "kept"])
def test_every_rival_moves_right_bytes(tmp_path: Path, rival: str) -> None:
    """What is read back is what was written two slices before, not what the memory held."""
    size = 64 << 10
    memory = memoryview(bytearray(size * 160))
    slice_ = memory[-_address(memory) % 4096 :][: size * 128]
    slice_[:] = bytes(len(slice_))
    opened = {
        "raw": lambda: RawBlocks(str(tmp_path), slice_, size),
        "files": lambda: FilePerPage(str(tmp_path), slice_, size, sync=True),
        "segments": lambda: Segments(str(tmp_path), slice_, size, sync=False),
        "kept": lambda: Segments(str(tmp_path), slice_, size, sync=True, keep_read=True),
    }[rival]()
    for fill in (1, 2):
        slice_[:] = bytes([fill]) * len(slice_)
        opened.write()
    got = []
    for _ in range(4):
        opened.prepare_read()
        opened.read()
        got.append((slice_[0], slice_[-1]))
    opened.close()
    assert got == [(0, 0), (0, 0), (1, 1), (2, 2)]


def test_the_bench_answers_with_its_headlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = stores._Lives(most=1, seconds=0.0, each=Budget(seconds=0.0, fewest=1))
    monkeypatch.setattr(stores, "_QUICK", stores._Plan(raw=least, files=least, few=least))
    monkeypatch.setattr(stores, "SLICE_BYTES", 16 << 20)
    monkeypatch.setattr("phloem.bench.store_rivals.FOOTPRINT_BYTES", 144 << 20)
    monkeypatch.chdir(tmp_path)
    results = {each["name"]: each["value"] for each in stores.run(quick=True)["results"]}
    for name in ("store_over_raw_64k", "store_over_raw_256k", "store_over_raw_1m"):
        assert results[name] > 0
        verb = name.replace("store_", "store_{}_")
        assert results[name] == min(results[verb.format(v)] for v in ("write", "read"))
    assert results["store_over_file_per_page"] > 0
    assert list(tmp_path.iterdir()) == []


def _address(memory: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(memory, np.uint8).ctypes.data)
