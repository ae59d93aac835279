"""The profile: times add up, nothing stays wrapped, and every point still exists."""

from __future__ import annotations

import importlib
import json
import threading
import time
import types
from pathlib import Path

import pytest

from phloem.bench.profile.chrome import trace_events, write_trace
from phloem.bench.profile.points import (
    ENGINE_POINTS,
    FRONT_POINTS,
    NATIVE_POINTS,
    OUTSIDE_GROUPS,
    STEP,
    TORCH_POINTS,
)
from phloem.bench.profile.run import ProfileOptions
from phloem.bench.profile.spans import (
    Point,
    Recorder,
    Span,
    exclusive_ns,
    instrument,
    read_spans,
    write_spans,
)
from phloem.bench.profile.steps import decode_report
from phloem.core.errors import ConfigError

POINTS = (*ENGINE_POINTS, *FRONT_POINTS, *NATIVE_POINTS, *TORCH_POINTS)


def span(name: str, start: int, end: int, **more) -> Span:
    fields = {"group": "g", "process": "p", "thread": "t", "args": {}, **more}
    fields.setdefault("cpu_ns", (end - start) // 2)
    return Span(name=name, start_ns=start, end_ns=end, **fields)


def resolve(target: str) -> tuple[object, str]:
    module, _, path = target.partition(":")
    owner: object = importlib.import_module(module)
    *outer, attribute = path.split(".")
    for name in outer:
        owner = getattr(owner, name)
    return owner, attribute


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.target)
def test_every_point_is_a_function_that_is_defined_just_there(point: Point) -> None:
    """A function that was renamed or moved would vanish from the table without a word."""
    owner, attribute = resolve(point.target)
    assert isinstance(vars(owner)[attribute], types.FunctionType)


def test_after_the_profile_every_function_is_the_one_it_was() -> None:
    before = [vars(owner)[name] for owner, name in map(resolve, (p.target for p in POINTS))]
    with instrument(POINTS, Recorder("p")):
        during = [vars(owner)[name] for owner, name in map(resolve, (p.target for p in POINTS))]
    after = [vars(owner)[name] for owner, name in map(resolve, (p.target for p in POINTS))]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert not any(a is b for a, b in zip(before, during, strict=True))


def test_a_failing_function_is_timed_and_fails_as_before() -> None:
    recorder = Recorder("p")

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        recorder.wrap(Point("", "fails", "g"), fails)()
    assert [one.name for one in recorder.spans()] == ["fails"]


def test_exclusive_times_leave_out_what_is_inside_and_sum_to_the_whole() -> None:
    spans = [
        span("outer", 0, 100),
        span("inner", 10, 60),
        span("innermost", 20, 30),
        span("second", 70, 90),
        span("elsewhere", 20, 80, thread="u"),  # another thread is no inside
    ]
    assert [own for own, _ in exclusive_ns(spans)] == [30, 40, 10, 20, 60]
    assert [cpu for _, cpu in exclusive_ns(spans)] == [15, 20, 5, 10, 30]
    assert sum(own for own, _ in exclusive_ns(spans)[:4]) == 100


def test_a_function_that_waits_has_time_but_no_core() -> None:
    """Red if waiting counted as work, or the work of another thread as this one's."""
    recorder, work = Recorder("p"), threading.Event()

    def burns() -> None:
        end = time.thread_time_ns() + 5_000_000
        while time.thread_time_ns() < end:
            pass
        work.set()

    def waits() -> None:
        thread = threading.Thread(target=recorder.wrap(Point("", "burns", "g"), burns))
        thread.start()
        work.wait(30)
        thread.join()

    recorder.wrap(Point("", "waits", "g"), waits)()
    cpu_ns = {one.name: one.cpu_ns for one in recorder.spans()}
    assert cpu_ns["burns"] >= 5_000_000
    assert cpu_ns["waits"] < 4_000_000


def decode_spans(num_steps: int, *, rows: int = 2) -> list[Span]:
    """Steps of 100 ns, 10 ns apart; a scheduler's pass of 30 ns, of which 10 ns are the log's."""
    out = []
    for i in range(num_steps):
        at = 110 * i
        args = {"step": i, "rows": rows, "tokens": rows}
        step = {"group": STEP, "thread": "worker", "args": args}
        out.append(span("rest", at, at + 100, **step))
        out.append(span("layer", at + 5, at + 85, group="layers", thread="worker"))
        out.append(span("plan", at + 20, at + 50, group="scheduler"))
        out.append(span("append", at + 30, at + 40, group="log"))
    return out


def test_a_step_is_taken_apart_into_what_was_done_in_it() -> None:
    prefill = span(
        "rest",
        5_000_000,
        9_000_000,
        group=STEP,
        thread="worker",
        args={"step": 99, "rows": 2, "tokens": 700},
    )
    report = decode_report([*decode_spans(30), prefill], batch=2)
    assert report is not None
    assert set(report.step_ms) == {110e-6}
    assert set(report.gap_ms) == {10e-6}
    assert report.outside_ms == pytest.approx([30e-6] * len(report.step_ms))
    assert report.outside_cpu_ms == pytest.approx([15e-6] * len(report.step_ms))
    ms = {row.name: row.ms[0] for row in report.rows}
    assert ms == pytest.approx({"rest": 20e-6, "layer": 80e-6, "plan": 20e-6, "append": 10e-6})
    assert {row.group for row in report.rows} & set(OUTSIDE_GROUPS) == {"scheduler", "log"}


def test_without_steady_steps_there_is_no_report() -> None:
    assert decode_report(decode_spans(30), batch=5) is None
    assert decode_report(decode_spans(8), batch=2) is None


def test_the_trace_has_what_viewers_need(tmp_path: Path) -> None:
    """Complete events with microseconds, and a name for each process and thread."""
    spans = [span("a", 5_000, 7_000), span("b", 6_000, 8_000, process="q", thread="t")]
    write_trace(tmp_path / "trace.json", spans)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events == trace_events(spans)
    complete = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in complete] == [("a", 0, 2), ("b", 1, 2)]
    assert len({(e["pid"], e["tid"]) for e in complete}) == 2
    named = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert named == {"p", "q", "t"}


def test_spans_cross_between_processes_unchanged(tmp_path: Path) -> None:
    write_spans(tmp_path / "spans.json", decode_spans(3))
    assert read_spans(tmp_path / "spans.json") == decode_spans(3)


@pytest.mark.parametrize("batches", ["", "1,x", "0", "-1"])
def test_wrong_batches_are_refused(batches: str) -> None:
    with pytest.raises(ConfigError, match="--batches"):
        ProfileOptions(batches=batches)
