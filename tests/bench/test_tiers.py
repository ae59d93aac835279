"""The bench of the tiers: it measures what it says, on a model of any size."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from phloem.bench import tiers
from phloem.bench.tier_copy import measure_copies
from phloem.bench.tier_ttft import TtftOptions, measure_ttft, upper_bound
from phloem.core.errors import ConfigError
from tests.engine.fakes import byte_tokenizer
from tests.models.checkpoints import make_checkpoint


def test_the_bound_is_above_the_median_and_shrinks_with_more_samples() -> None:
    few = [0.9, 1.0, 1.1, 1.0, 1.2]
    assert 1.0 <= upper_bound(few) <= 1.2
    assert upper_bound(few * 20) <= upper_bound(few)
    assert upper_bound([1.0] * 9) == 1.0


def test_every_way_to_a_first_token_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`_sample` itself refuses to time another tier than the one it names."""
    make_checkpoint("llama", tmp_path / "m")
    byte_tokenizer().save(str(tmp_path / "m" / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    options = TtftOptions(
        model=str(tmp_path / "m"), cached=128, lengths=(64, 256), pairs=2, cold_samples=2
    )
    said: list[str] = []
    results = {result["name"]: result for result in measure_ttft(options, said.append)}
    assert len(said) == 2 + 2  # begun, two ratios, and each length
    assert set(results) == {
        "host_hit_over_device_hit_ttft",
        "storage_hit_over_cold_ttft",
        "worst_tier_over_best_bound",
        "aa_control",
    }
    assert all(math.isfinite(result["value"]) for result in results.values())
    bounds = results["worst_tier_over_best_bound"]["samples"]
    assert set(bounds) == {"host_64", "storage_64", "host_256", "storage_256"}
    assert list(tmp_path.glob(".bench-tiers-*")) == []


def test_copies_are_compared_with_memcpy_in_pairs() -> None:
    results = {result["name"]: result for result in measure_copies(2)}
    both = (results["backup_over_memcpy"]["value"], results["load_over_memcpy"]["value"])
    assert results["host_copy_over_memcpy"]["value"] == min(both) > 0


def test_parts_are_measured_alone_and_say_when_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "measure_copies", lambda count: [{"name": "copies", "value": count}])
    monkeypatch.setattr(tiers, "measure_ttft", lambda options, say: [{"name": "t", "o": options}])
    said: list[str] = []
    document = tiers.run(True, lengths=(64,), pairs=3, parts=["ttft", "copies"], say=said.append)
    copies, ttft = document["results"]
    assert (copies["name"], ttft["o"].lengths, ttft["o"].pairs) == ("copies", (64,), 3)
    assert [line.split(":")[0] for line in said] == ["copies", "ttft"]


def test_lengths_are_read_and_bounded() -> None:
    assert tiers.parse_lengths("256, 8000") == (256, 8000)
    for text in ("", "x", "256,", "31", "8001", "-256"):
        with pytest.raises(ConfigError, match="lengths are tokens"):
            tiers.parse_lengths(text)
