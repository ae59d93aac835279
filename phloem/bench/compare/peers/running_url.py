"""A server that somebody else has started: only measured, never stopped."""

from __future__ import annotations

from dataclasses import dataclass

from phloem.bench.compare.peer import Attached, PeerUnavailable, Say, ServerSpec

__all__ = ["RunningUrl"]


@dataclass(frozen=True, slots=True)
class RunningUrl:
    """What can be asked of it without restarting it."""

    url: str
    key: str = "url"
    dtypes: tuple[str, ...] = ("its own",)

    @property
    def name(self) -> str:
        return self.url

    def prepare(self, say: Say) -> str:  # noqa: ARG002
        return "unknown"

    def launch(self, spec: ServerSpec, port: int) -> Attached:  # noqa: ARG002
        if spec.sized:
            raise PeerUnavailable("its pool is its own: the agent trace needs one of a given size")
        return Attached(self.url)
