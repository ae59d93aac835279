"""`phloem bench cp`: its parts run, and what they say of exact things is exact."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from phloem.bench import cp
from phloem.bench.cp_control import measure_control
from phloem.bench.cp_engines import EngineShape, open_engines, random_prompt, write_random_model
from phloem.bench.cp_gather import _gathered_bytes, _saving


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


def test_bytes_that_travel() -> None:
    """SmolLM2's heads: 28 times fewer for 64 queries than for 8K tokens (DESIGN 7)."""
    assert 28 < _saving(64, 8192) < 28.5
    two_chunks = (2048 + 4096) // 2 * 2 * 3 * 64 * 2
    assert _gathered_bytes(4096) == 2 * two_chunks  # of two layers


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(ValueError, match="no part 'nope'"):
        cp.run(parts=["nope"])
