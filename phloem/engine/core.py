"""The engine's core: what both the engine process and the offline `LLM` drive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from phloem.config import Config
from phloem.core.request import GenerateRequest, OutputChunk
from phloem.core.stats import EngineStats
from phloem.engine.commands import Command, Reply
from phloem.engine.facts import EngineFacts

__all__ = ["BuildHooks", "CoreBuilder", "EngineCore", "OnLoad"]

OnLoad: TypeAlias = Callable[[int, int, str], None]  # done, total, phase


class EngineCore(Protocol):
    """Requests in; a pass of the loop at a time; chunks out through the `emit` it was built with.

    One thread drives it.
    """

    @property
    def facts(self) -> EngineFacts: ...

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises UserError if it is refused."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        ...

    def step(self) -> bool:
        """One pass; False when there is nothing to do. An exception means the core is dead."""
        ...

    def flush(self) -> int:
        """Forget the cached pages; returns how many stay locked by running requests."""
        ...

    def stats(self) -> EngineStats: ...

    def command(self, command: Command, reply: Reply) -> None:
        """Carry it out; `reply` is called once, now or in a later pass."""
        ...

    def farewell(self) -> None:
        """The end that comes now is in order: whoever serves this core is told so."""
        ...

    def close(self) -> None:
        """Give back threads and memory."""
        ...


class BuildHooks(Protocol):
    """What a core calls while it is built and while it runs."""

    def emit(self, chunks: list[OutputChunk]) -> None:
        """New output, at most once a step."""
        ...

    def on_wait(self) -> None:
        """A step is still running: a chance to add, abort, flush or ask for stats."""
        ...

    def wake(self) -> None:
        """`step` has something to tell although it was idle. Called from any thread."""
        ...

    def on_layer(self) -> None:
        """A layer has been computed. Called from the worker's thread."""
        ...

    def on_load(self, done: int, total: int, phase: str) -> None:
        """Progress of loading."""
        ...


# The ids that end an answer are known to the tokenizer, which lives in the front.
CoreBuilder: TypeAlias = Callable[[Config, BuildHooks, tuple[int, ...]], EngineCore]
