"""Spans as a trace that chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phloem.bench.profile.spans import Span

__all__ = ["trace_events", "write_trace"]


def trace_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Complete events ("X") in microseconds from the first span; processes and threads by name."""
    origin = min((span.start_ns for span in spans), default=0)
    processes = _numbers([span.process for span in spans])
    threads = _numbers([(span.process, span.thread) for span in spans])
    names: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}
        for name, number in processes.items()
    ]
    names += [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": processes[process],
            "tid": number,
            "args": {"name": thread},
        }
        for (process, thread), number in threads.items()
    ]
    return names + [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.group,
            "pid": processes[span.process],
            "tid": threads[span.process, span.thread],
            "ts": (span.start_ns - origin) / 1000,
            "dur": span.ns / 1000,
            "args": span.args,
        }
        for span in spans
    ]


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Write the file."""
    document = {"traceEvents": trace_events(spans), "displayTimeUnit": "ms"}
    path.write_text(json.dumps(document))


def _numbers(keys: Sequence[Any]) -> dict[Any, int]:
    return {key: number for number, key in enumerate(dict.fromkeys(keys), start=1)}
