"""Models with windows and tiers in the whole engine: tails come back, and only to whom they fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from phloem.core.errors import ConfigError
from phloem.engine import LLM
from phloem.engine.commands import ClearCache, VerifyCache
from tests.engine.fakes import byte_tokenizer
from tests.engine.test_tiers import GREEDY
from tests.models.checkpoints import make_windowed
from tests.parity.test_journeys import words

WINDOW, PAGE = 12, 4
FAMILIES = ("gemma3", "mistral")  # windows and full layers; windows alone


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("windowed")
    for family in FAMILIES:
        make_windowed(family, folder / family, window=WINDOW)
        byte_tokenizer().save(str(folder / family / "tokenizer.json"))
    return {family: folder / family for family in FAMILIES}


def open_llm(model: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "fp32",
        "page_size": PAGE,
        "num_pages": 60,
        "max_model_len": 128,
        "prefetch_policy": "wait_complete",
        "host_memory": "4MB",
        "threads": 1,
    }
    return LLM(str(model), **{**defaults, **settings})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_engine_finds_the_tails_that_the_last_one_stored(
    models: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """Two pools, two arenas, two scopes of keys and one store; the answer is cold's."""
    prompt = words(1, 41)
    settings = {"storage": str(tmp_path), "storage_size": "32MB"}
    with open_llm(models[family], host_memory="0", prefix_cache=False) as llm:
        cold = llm.generate(prompt, GREEDY)[0].token_ids
    with open_llm(models[family], **settings) as llm:
        first = llm.generate(prompt, GREEDY)[0]
    with open_llm(models[family], **settings) as llm:
        second = llm.generate(prompt, GREEDY)[0]
        assert llm.operate(VerifyCache()) == {"ok": True}
        stats = llm.stats()
    assert (first.cached.total, second.cached.storage) == (0, 40)
    assert first.token_ids == second.token_ids == cold
    moved = {way.kind: way.bytes_total for way in stats.tiers.transfers}
    assert moved["prefetch"] == moved["load_back"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_left_the_device_come_back_from_the_host(
    models: dict[str, Path], family: str
) -> None:
    prompts = [words(seed, 61) for seed in range(6)]  # 6 x 16 pages, and 6 x 4 of windows
    with open_llm(models[family], num_pages={"gemma3": 60, "mistral": 16}[family]) as llm:
        cold = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
        again = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
        assert llm.operate(VerifyCache()) == {"ok": True}
        llm.operate(ClearCache(storage=False))
    assert [answer.token_ids for answer in again] == cold
    assert sum(answer.cached.host for answer in again) > 0


def test_another_window_never_hits(models: dict[str, Path], tmp_path: Path) -> None:
    """The same weights, read with a window of another length: other keys, and cold's answer."""
    other = tmp_path / "other"
    shutil.copytree(models["mistral"], other)
    config = (other / "config.json").read_text()
    changed = config.replace(f'"sliding_window": {WINDOW}', f'"sliding_window": {WINDOW + 4}')
    assert changed != config
    (other / "config.json").write_text(changed)
    prompt = words(2, 61)
    settings = {"storage": str(tmp_path / "store"), "storage_size": "32MB"}
    with open_llm(models["mistral"], **settings) as llm:
        llm.generate(prompt, GREEDY)
    with open_llm(other, host_memory="0", prefix_cache=False) as llm:
        cold = llm.generate(prompt, GREEDY)[0].token_ids
    with open_llm(other, **settings) as llm:
        found = llm.generate(prompt, GREEDY)[0]
    assert (found.cached.total, found.token_ids) == (0, cold)


def test_a_host_without_room_for_a_page_of_each_component_is_refused(
    models: dict[str, Path],
) -> None:
    with pytest.raises(ConfigError, match="--host-memory of 2,000 bytes holds no KV page"):
        open_llm(models["gemma3"], host_memory="2000")
