"""What the comparison asks of an engine: an environment, and how to start it as a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from phloem.bench.compare.model_files import ModelFiles

__all__ = ["Attached", "Launch", "Peer", "PeerUnavailable", "Say", "ServerSpec"]

Say = Callable[[str], None]  # a line of progress for people


class PeerUnavailable(Exception):
    """A peer that cannot be run here; its message is reported beside the figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """What a server must provide; the same for both sides of a pair.

    `sized`: the figure means something only with a pool of just `pool_tokens`.
    `storage`: a folder that may keep pages over a restart (who cannot, ignores it).
    """

    model: ModelFiles
    pool_tokens: int
    max_model_len: int
    max_running: int
    threads: int
    dtype: str
    sized: bool = False
    storage: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command line that serves HTTP on a loopback port, and the variables it needs."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/v1/models"

    def shown(self) -> str:
        """The command as one would type it."""
        words = [f"{name}={value}" for name, value in sorted(self.env.items())]
        return " ".join([*words, *self.argv])


@dataclass(frozen=True, slots=True)
class Attached:
    """A server that runs already, and is neither started nor stopped by us."""

    url: str

    def shown(self) -> str:
        return f"(already running at {self.url})"


class Peer(Protocol):
    """An engine. `key` is how figures name it (`prefill_512_over_KEY`)."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str: ...

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Precisions worth trying; the faster one on this machine is measured."""
        ...

    def prepare(self, say: Say) -> str:
        """Find or install it; returns its version. Raises PeerUnavailable."""
        ...

    def launch(self, spec: ServerSpec, port: int) -> Launch | Attached:
        """How to start it on `port`. Raises PeerUnavailable for what it cannot provide."""
        ...
