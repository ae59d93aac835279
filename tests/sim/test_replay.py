"""Replay on small traces of our own, and traces that are broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phloem.core.errors import EngineDead
from phloem.core.tokens import tokens_from_bytes
from phloem.loop import EngineLoop
from phloem.sched import Scheduler
from phloem.sim import ReplayTarget, TraceError, TraceRequest, read_trace, replay, trace_tokens
from phloem.sim.replay import simulated_target
from tests.sched.rig import FailingWorker


def line(arrival_s: float, ids: list[int], length: int, outputs: int = 4) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s,
        num_prompt_tokens=length,
        num_output_tokens=outputs,
        hash_ids=tuple(ids),
    )


def test_equal_ids_are_equal_tokens_and_other_ids_are_not():
    one = trace_tokens(line(0, [5, 6, 7], 40), vocab_size=100)
    two = trace_tokens(line(0, [5, 6, 8], 48), vocab_size=100)
    assert len(one) == 40 * 4
    assert one[: 32 * 4] == two[: 32 * 4]
    assert one[32 * 4 :] != two[32 * 4 : 40 * 4]
    assert tokens_from_bytes(two).max() < 100
    assert tokens_from_bytes(two).min() >= 0


def test_the_last_token_is_always_computed():
    trace = [line(0, [1, 2], 32), line(0, [1, 2], 32), line(0, [1, 2, 3], 33)]
    assert replay(trace).cached_by_request == (0, 16, 32)


def test_refused_requests_count_apart():
    trace = [line(0, [1, 2, 3], 48), line(0, [1], 16), line(0, [1], 16)]
    report = replay(trace, num_pages=2)
    assert (report.requests, report.refused) == (3, 1)
    assert report.cached_by_request == (None, 0, 0)
    assert report.prompt_tokens == 32


def test_timed_requests_overlap_and_take_the_time_of_the_model():
    """Arrivals are kept: two close ones share nothing yet, a late one finds both."""
    trace = [line(0.0, [1, 2], 32), line(1.0, [3, 4], 32), line(100.0, [1, 2, 5], 40)]
    report = replay(trace, timed=True, max_tokens=None)
    assert report.cached_by_request == (0, 0, 32)
    assert report.elapsed_s > 100.0
    assert replay(trace, max_tokens=None).elapsed_s < 1.0


def test_progress_is_told():
    calls = []
    replay([line(0, [1], 16)] * 3, on_progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_a_target_that_dies_stops_the_replay():
    simulated = simulated_target(num_pages=10)

    def make_loop(emit) -> EngineLoop:
        loop = simulated.make_loop(emit)
        scheduler: Scheduler = loop.scheduler
        return EngineLoop(scheduler, FailingWorker(1, "collect"), loop.clock, emit)

    with pytest.raises(EngineDead, match="out of memory"):
        replay([line(0, [1], 16)] * 3, target=ReplayTarget(make_loop=make_loop))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", r"t.jsonl:1: not a trace line"),
        ("[1]", r"t.jsonl:1: not a trace line"),
        ('{"timestamp": 0, "output_length": 1, "hash_ids": [1]}', "no field 'input_length'"),
        ('{"timestamp":0,"input_length":40,"output_length":1,"hash_ids":[1]}', "need 3 hash_ids"),
        ('{"timestamp":0,"input_length":0,"output_length":1,"hash_ids":[]}', "at least 1"),
        ('{"timestamp":0,"input_length":"x","output_length":1,"hash_ids":[]}', "not a trace"),
        ('{"timestamp":0,"input_length":4,"output_length":1,"hash_ids":[-1]}', "not negative"),
        ('{"timestamp":0,"input_length":4,"output_length":1,"hash_ids":[1e30]}', "below 2"),
    ],
)
def test_a_broken_trace_says_file_line_and_why(tmp_path: Path, text: str, message: str):
    path = tmp_path / "t.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(TraceError, match=message):
        list(read_trace(path))


def test_a_trace_that_is_not_there_or_not_text(tmp_path: Path):
    with pytest.raises(TraceError, match="No such file"):
        list(read_trace(tmp_path / "none.jsonl"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="UTF-8"):
        list(read_trace(tmp_path / "binary"))


def test_blank_lines_are_skipped(tmp_path: Path):
    path = tmp_path / "t.jsonl"
    row = {"timestamp": 1500, "input_length": 16, "output_length": 2, "hash_ids": [9]}
    path.write_text("\n" + json.dumps(row) + "\n\n")
    (request,) = read_trace(path)
    assert request == line(1.5, [9], 16, 2)
