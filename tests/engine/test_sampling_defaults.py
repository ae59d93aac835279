"""Where a request does not say, the model's own recommendation holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from phloem.engine.api import SamplingDefaults
from phloem.engine.sampling_defaults import sampling_defaults

PLAIN = SamplingDefaults()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"temperature": 0.6, "top_p": 0.95, "top_k": 20}', (0.6, 0.95, 20, 1.0)),
        ('{"repetition_penalty": 1.1, "temperature": 1}', (1.0, 1.0, 0, 1.1)),
        ('{"do_sample": false, "temperature": 0.6}', (0.0, 1.0, 0, 1.0)),
        ('{"temperature": -3, "top_p": "much", "top_k": true}', (1.0, 1.0, 0, 1.0)),
        ("[]", (1.0, 1.0, 0, 1.0)),
        ("{", (1.0, 1.0, 0, 1.0)),
    ],
)
def test_a_checkpoints_recommendation_is_used_as_far_as_it_can_be(
    tmp_path: Path, text: str, expected: tuple[float, float, int, float]
) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    got = sampling_defaults("any", tmp_path)
    assert (got.temperature, got.top_p, got.top_k, got.repetition_penalty) == expected


def test_without_one_the_api_s_own_defaults_hold(tmp_path: Path) -> None:
    assert sampling_defaults("any", tmp_path) == PLAIN
    assert sampling_defaults("any", tmp_path / "model.gguf") == PLAIN


def test_smollm2_is_sampled_as_its_makers_do() -> None:
    assert sampling_defaults("smollm2", Path("x.gguf")) == SamplingDefaults(
        temperature=0.2, top_p=0.9
    )


def test_a_folder_that_is_called_smollm2_has_its_own_say(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.9}')
    assert sampling_defaults("smollm2", tmp_path) == SamplingDefaults(temperature=0.9)
