"""Spans of time, recorded by wrapping functions from outside; off means that nothing is wrapped."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "SPANS_FILE",
    "Point",
    "Recorder",
    "Span",
    "exclusive_ns",
    "instrument",
    "read_spans",
    "write_spans",
]

SPANS_FILE = "PHLOEM_BENCH_SPANS"  # between the two processes of one bench, not a setting

Describe = Callable[[tuple[Any, ...]], dict[str, int]]


@dataclass(frozen=True, slots=True)
class Point:
    """A function to time. `target` is "module:name" or "module:Class.name".

    `describe` turns its arguments into numbers that are kept with the span.
    """

    target: str
    name: str
    group: str
    describe: Describe | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One call. Times are of the system's monotonic clock, so processes can be compared.

    `cpu_ns`: how long its thread had a core in it; the rest it waited, for a core, the
    interpreter's lock or somebody else.
    """

    name: str
    group: str
    process: str
    thread: str
    start_ns: int
    end_ns: int
    cpu_ns: int
    args: dict[str, int]

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


class Recorder:
    """Collects the spans of one process. Appending to a list is safe from any thread."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._rows: list[tuple[Point, str, int, int, int, dict[str, int] | None]] = []

    def wrap(self, point: Point, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed."""
        rows, describe = self._rows, point.describe
        clock, cpu_clock = time.perf_counter_ns, time.thread_time_ns
        current = threading.current_thread

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            described = None if describe is None else describe(args)
            cpu_start = cpu_clock()
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                end = clock()
                rows.append((point, current().name, start, end, cpu_clock() - cpu_start, described))

        return timed

    def spans(self) -> list[Span]:
        """What was recorded so far, in order of their ends."""
        return [
            Span(
                name=point.name,
                group=point.group,
                process=self._process,
                thread=thread,
                start_ns=start,
                end_ns=end,
                cpu_ns=cpu,
                args=args or {},
            )
            for point, thread, start, end, cpu, args in list(self._rows)
        ]


@contextlib.contextmanager
def instrument(points: Sequence[Point], recorder: Recorder) -> Iterator[None]:
    """Time every point for a while; afterwards everything is as it was.

    What has kept a bound method before this is not timed, so wrap before objects are built.
    """
    with contextlib.ExitStack() as stack:
        for point in points:
            owner, attribute = _find(point.target)
            original = vars(owner)[attribute]
            setattr(owner, attribute, recorder.wrap(point, original))
            stack.callback(setattr, owner, attribute, original)
        yield


def write_spans(path: Path, spans: Sequence[Span]) -> None:
    """Leave spans for another process."""
    path.write_text(json.dumps([asdict(span) for span in spans]))


def read_spans(path: Path) -> list[Span]:
    """The spans that another process has left."""
    return [Span(**row) for row in json.loads(path.read_text())]


def exclusive_ns(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Each span's time and its thread's CPU time, without those of the spans inside it."""
    own = [span.ns for span in spans]
    cpu = [span.cpu_ns for span in spans]
    stacks: dict[tuple[str, str], list[int]] = {}
    order = sorted(range(len(spans)), key=lambda i: (spans[i].start_ns, -spans[i].end_ns))
    for i in order:
        span = spans[i]
        stack = stacks.setdefault((span.process, span.thread), [])
        while stack and spans[stack[-1]].end_ns <= span.start_ns:
            stack.pop()
        if stack:
            own[stack[-1]] -= span.ns
            cpu[stack[-1]] -= span.cpu_ns
        stack.append(i)
    return list(zip(own, cpu, strict=True))


def _find(target: str) -> tuple[Any, str]:
    """The module or class that holds a function, and the function's name there."""
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, attribute = path.split(".")
    for name in outer:
        owner = getattr(owner, name)
    return owner, attribute
