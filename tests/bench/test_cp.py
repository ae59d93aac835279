"""`phloem bench cp`: its parts run, and what they say of exact things is exact."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from phloem.bench import cp, cp_gather, cp_replicas, cp_ways
from phloem.bench.cp_control import measure_control
from phloem.bench.cp_engines import EngineShape, open_engines, random_prompt, write_random_model
from phloem.bench.cp_linked import open_linked
from phloem.core.remote import IN_PLACE
from phloem.sim import TraceRequest


def test_the_log_is_measured_at_both_ends() -> None:
    results = {each.name: each for each in measure_control()}
    assert results.keys() == {"follower_apply_us", "leader_added_us_4_ranks"}
    assert all(each.value is not None and each.value > 0 for each in results.values())


def test_engines_of_all_placements_answer_prompts_they_have_not_seen(tmp_path: Path) -> None:
    """What `direct_cost_bound` compares exists, and nothing of a prompt is cached by the next."""
    model = write_random_model(tmp_path, num_layers=1)
    shapes = [
        EngineShape(cp=2, num_pages=1300),
        EngineShape(cp=2, placement="replicate", num_pages=1300),
    ]
    rng = random.Random(3)
    with open_engines(model, *shapes) as engines:
        for engine in engines:
            prompt = random_prompt(rng, 40)
            for _ in range(2):
                assert engine.answer(prompt, 2) > 0
                engine.forget()
            assert engine.cached_tokens == 0
            engine.answer(prompt)
            engine.answer(prompt)
            assert engine.cached_tokens == 32


def test_bytes_that_travel(tmp_path: Path) -> None:
    """What the link carries is what ranks need, and what a few queries save is counted.

    Rank 1 has the last page of each chunk of 8, so nothing on rank 0 sees it."""
    model = write_random_model(tmp_path, num_layers=cp_gather.NUM_LAYERS)
    with open_linked(model, 512, chunk=128) as ranks:
        ranks.prefill(IN_PLACE)
        assert ranks.link.carried.total() == 0
        ranks.prefill(cp_gather.GATHER)
        token, partial = 2 * 3 * 64 * 2, 9 * (64 * 2 + (64 + 1) * 4)
        halves = (128 + 256 + 384 + 512) // 2
        assert ranks.link.carried == {0: 2 * (halves - 4 * 16) * token, 1: 2 * halves * token}
        step = {"cached": 256, "new": 64}
        assert ranks.bytes_of(cp_gather.GATHER, **step) == 2 * (256 + 64 - 16) * token
        assert ranks.bytes_of(cp_gather.SEND, **step) == 2 * 64 * partial


def test_a_choice_is_compared_with_every_way(tmp_path: Path, monkeypatch) -> None:
    """What is picked is one of the pairs that were timed, and none is faster than the best."""
    monkeypatch.setattr(cp_ways, "STEPS", {"few": (256, 16), "all": (0, 128)})
    model = write_random_model(tmp_path, num_layers=2)
    with open_linked(model, 512, chunk=128) as ranks:
        results = cp_ways._over_a_link(ranks, 2)
    assert [each.name for each in results] == ["auto_over_best_few", "auto_over_best_all"]
    for each in results:
        assert each.value >= 1.0
        assert each.samples["picked"] in each.samples
        assert len(each.samples) == 5


def test_pages_that_replicas_spare_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with the same eight pages, one after another, each of which computes a ninth on one
    rank, and needs the other one's four for it. The second makes replicas of them on its rank, the
    third, on the other rank, there; the others fetch nothing."""
    monkeypatch.setattr(cp_replicas, "CONFIG", cp_replicas.ReplicaConfig(reads=1))
    trace = [
        TraceRequest(
            arrival_s=100.0 * number,
            num_prompt_tokens=9 * 16,
            num_output_tokens=1,
            hash_ids=(*range(8), 100 + number),
        )
        for number in range(7)
    ]
    plainly, hits = cp_replicas.travel(trace, 100, None)
    spared, same_hits = cp_replicas.travel(trace, 100, cp_replicas.CONFIG)
    assert hits == same_hits == 6 * 8 * 16
    assert plainly == 8 + 6 * 4  # both ranks compute the first one
    assert spared == 8 + 2 * (4 + 4)


def test_a_turn_over_replicas_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_replicas, "CACHED", 256)
    monkeypatch.setattr(cp_replicas, "CHUNK", 128)
    model = write_random_model(tmp_path, num_layers=cp_replicas.NUM_LAYERS)
    with cp_replicas._open(model) as turns:
        for remote in (IN_PLACE, cp_replicas.GATHER):
            assert -1 < cp_replicas._pair(turns, remote, 64) < 20


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(ValueError, match="no part 'nope'"):
        cp.run(parts=["nope"])
