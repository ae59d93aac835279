"""Replay with sliding-window layers, on a small trace of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phloem.cache import WindowConfig
from phloem.cli.main import main
from phloem.sim import TraceRequest, pages_of, replay, simulated_target

PAGE = 16


def turns(session: int, count: int, pages: int = 10) -> list[TraceRequest]:
    """A session that grows by some pages a turn."""
    return [
        TraceRequest(
            arrival_s=0.0,
            num_prompt_tokens=PAGE * (pages + 2 * turn) + 5,
            num_output_tokens=1,
            hash_ids=tuple(session * 1000 + i for i in range(pages + 2 * turn + 1)),
        )
        for turn in range(count)
    ]


TRACE = [request for pair in zip(*(turns(s, 5) for s in range(4)), strict=True) for request in pair]


def report(window_pages: int, *, layers: int = 1000, checkpoint: int = 0):
    window = WindowConfig(tokens=33, layers=layers, pages=(window_pages,), checkpoint=checkpoint)
    num_pages = pages_of(TRACE, max_tokens=1, page_size=PAGE)
    return replay(TRACE, target=simulated_target(num_pages=num_pages, window=window))


def test_with_room_for_everything_windows_change_nothing():
    assert report(1000).cached_by_request == replay(TRACE).cached_by_request


def test_tails_of_all_sessions_are_enough():
    """2 pages for each of 4 sessions, as many again for what runs."""
    found = report(16)
    assert found.cached_by_request == replay(TRACE).cached_by_request
    assert found.window_evicted_pages > 0


def test_too_few_for_all_sessions_lose_hits_and_restarts_win_some_back():
    lost, restarted = report(7), report(7, layers=2)
    assert lost.cached_tokens < restarted.cached_tokens < replay(TRACE).cached_tokens
    assert restarted.restarts > 0


def write(path: Path) -> str:
    lines = [
        {
            "timestamp": 0,
            "input_length": request.num_prompt_tokens,
            "output_length": 1,
            "hash_ids": list(request.hash_ids),
        }
        for request in TRACE
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def test_the_command_prints_what_the_function_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    trace = write(tmp_path / "t.jsonl")
    flags = ["--window", "33", "--window-pages", "7", "--window-layers", "2"]
    assert main(["replay", trace, *flags, "--window-checkpoint", "0", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    found = report(7, layers=2)
    assert document["cached_tokens"] == found.cached_tokens
    assert document["window_evicted_pages"] == found.window_evicted_pages
    assert document["restarts"] == found.restarts
    assert "restarts" in err


def test_a_pool_below_one_window_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = write(tmp_path / "t.jsonl")
    assert main(["replay", trace, "--window", "33", "--window-pages", "3"]) == 2
    assert "needs 4 window pages" in capsys.readouterr().err
