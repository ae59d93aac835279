"""What a core calls while a bench drives it."""

from __future__ import annotations

from dataclasses import dataclass, field

from phloem.core.request import OutputChunk

__all__ = ["KeptChunks"]


@dataclass(slots=True)
class KeptChunks:
    """`BuildHooks` that keep what the core emits; nothing else is of interest."""

    chunks: list[OutputChunk] = field(default_factory=list)

    def emit(self, chunks: list[OutputChunk]) -> None:
        self.chunks += chunks

    def on_wait(self) -> None:
        """Nobody else has anything to say."""

    def wake(self) -> None:
        """The next pass looks."""

    def on_layer(self) -> None:
        """Nobody watches."""

    def on_load(self, done: int, total: int, phase: str) -> None:
        """Nobody watches."""
