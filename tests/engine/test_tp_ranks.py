"""Processes that divide a model, under the whole engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from phloem.core.errors import ConfigError, EngineDead
from phloem.engine import LLM, startup_rows
from phloem.engine.commands import VerifyCache
from tests.engine.fakes import byte_tokenizer
from tests.engine.test_ranks import GREEDY, PROMPTS, ids, open_llm, rank_pids
from tests.models.checkpoints import make_checkpoint, make_latent


def saved(folder: Path, kind: str) -> Path:
    if kind == "v3":
        make_latent(kind, folder)
    else:
        make_checkpoint(kind, folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("tp"), "llama")


def answers(path: Path) -> list[tuple[int, ...]]:
    with open_llm(path, 1, prefix_cache=False) as llm:
        return [ids(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, ...]]:
    return answers(model)


def check_twice(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    """All at once in chunks, then each from cached pages."""
    assert ids(llm, PROMPTS) == expected
    again = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [one.token_ids for one in again] == expected
    assert all(one.cached.device > 0 for one in again)
    assert llm.operate(VerifyCache()) == {"ok": True}


def open_rows(model: Path, cp: int, remote_kv: str) -> LLM:
    settings = {"remote_kv": remote_kv, "host_memory": "1MB", "num_pages": 120}
    return open_llm(model, cp, tp=2, verify_collectives=True, **settings)


def check_rows(llm: LLM, cp: int, expected: list[tuple[int, ...]]) -> None:
    """A row owns pages: the memory of `cp` pools, whatever tp is."""
    rows = dict(startup_rows(llm._core.facts))
    assert rows["pages"].replace(",", "") == str(120 * cp)
    assert rows["ranks"].startswith(f"{2 * cp} processes (cp {cp} x tp 2), 120 pages for each 2")
    check_twice(llm, expected)


@pytest.mark.parametrize("cp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_row_of_processes_answers_as_one_rank(
    model: Path, expected: list[tuple[int, ...]], cp: int
) -> None:
    before = set(rank_pids(os.getpid()))
    with open_rows(model, cp, "direct") as llm:
        assert len(set(rank_pids(os.getpid())) - before) == 2 * cp - 1
        check_rows(llm, cp, expected)
    assert set(rank_pids(os.getpid())) == before


def test_rows_of_processes_answer_as_one_rank_and_a_killed_one_is_named(
    model: Path, expected: list[tuple[int, ...]]
) -> None:
    """Pages travel. Its number is that among all, not in its row; all others end."""
    before = set(rank_pids(os.getpid()))
    with open_rows(model, 2, "gather_kv") as llm:
        started = set(rank_pids(os.getpid())) - before
        assert len(started) == 3
        check_rows(llm, 2, expected)
        os.kill(max(started), signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"rank [123] failed: its process was killed by"):
            llm.generate(PROMPTS[0], GREEDY)
    assert set(rank_pids(os.getpid())) == before


def test_every_process_of_a_row_owns_latents(tmp_path: Path) -> None:
    path = saved(tmp_path, "v3")
    with open_llm(path, 1, tp=2) as llm:
        assert dict(startup_rows(llm._core.facts))["pages"] == "120"
        check_twice(llm, answers(path))


def test_a_directory_of_one_mesh_is_read_by_another(
    model: Path, tmp_path: Path, expected: list[tuple[int, ...]]
) -> None:
    settings: dict[str, Any] = {
        "storage": str(tmp_path),
        "storage_size": "32MB",
        "host_memory": "1MB",
    }
    with open_llm(model, 1, tp=2, **settings) as llm:
        ids(llm, PROMPTS)
    whole = [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]
    with open_llm(model, 1, **settings) as llm:
        found = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [one.token_ids for one in found] == expected
    assert [one.cached.storage for one in found] == whole


def test_a_model_that_cannot_be_divided_is_refused_before_anything_starts(model: Path) -> None:
    before = set(rank_pids(os.getpid()))
    with pytest.raises(ConfigError, match="--tp 3 does not divide the model's 2 KV heads; use"):
        open_llm(model, 1, tp=3)
    assert set(rank_pids(os.getpid())) == before
