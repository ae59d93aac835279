"""Inside the engine process: the usual core, with its functions timed.

The front names `build_profiled_core` as the builder: an engine that is not profiled never
imports this. The spans travel through a file, named in the environment that the child inherits.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from phloem.bench.profile.points import ENGINE_POINTS, NATIVE_POINTS, TORCH_POINTS
from phloem.bench.profile.spans import SPANS_FILE, Point, Recorder, instrument, write_spans
from phloem.config import Config
from phloem.core.request import GenerateRequest, OutputChunk
from phloem.core.stats import EngineStats
from phloem.engine.build import build_core
from phloem.engine.commands import Command, Reply
from phloem.engine.core import BuildHooks, EngineCore
from phloem.engine.facts import EngineFacts

__all__ = ["build_profiled_core"]

_EMIT = Point("", "encode, send", "ipc")


class _Hooks:
    """The process's own hooks; sending is timed."""

    def __init__(self, hooks: BuildHooks, recorder: Recorder) -> None:
        self._emit = recorder.wrap(_EMIT, hooks.emit)
        self.on_wait = hooks.on_wait
        self.wake = hooks.wake
        self.on_layer = hooks.on_layer
        self.on_load = hooks.on_load

    def emit(self, chunks: list[OutputChunk]) -> None:
        self._emit(chunks)


@dataclass(frozen=True, slots=True)
class _ProfiledCore:
    """Passes everything on; writes the spans when it is closed."""

    core: EngineCore
    recorder: Recorder
    stack: contextlib.ExitStack

    @property
    def facts(self) -> EngineFacts:
        return self.core.facts

    def add(self, request: GenerateRequest) -> None:
        self.core.add(request)

    def abort(self, request_id: str) -> None:
        self.core.abort(request_id)

    def step(self) -> bool:
        return self.core.step()

    def flush(self) -> int:
        return self.core.flush()

    def stats(self) -> EngineStats:
        return self.core.stats()

    def command(self, command: Command, reply: Reply) -> None:
        self.core.command(command, reply)

    def farewell(self) -> None:
        self.core.farewell()

    def close(self) -> None:
        self.core.close()
        self.stack.close()
        write_spans(Path(os.environ[SPANS_FILE]), self.recorder.spans())


def build_profiled_core(config: Config, hooks: BuildHooks, eos_ids: tuple[int, ...]) -> EngineCore:
    """A `CoreBuilder`."""
    recorder = Recorder("engine")
    stack = contextlib.ExitStack()
    stack.enter_context(instrument((*ENGINE_POINTS, *NATIVE_POINTS, *TORCH_POINTS), recorder))
    try:
        core = build_core(config, _Hooks(hooks, recorder), eos_ids)
    except BaseException:
        stack.close()
        raise
    return _ProfiledCore(core, recorder, stack)
