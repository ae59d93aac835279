"""What travels between the front process and the engine process: frames of MessagePack.

Nothing is pickled.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from phloem.config import Config
from phloem.core.frames import framed
from phloem.core.request import GenerateRequest, OutputChunk
from phloem.core.stats import EngineStats
from phloem.engine.commands import Command, CommandReply
from phloem.engine.facts import EngineFacts

__all__ = [
    "Abort",
    "Add",
    "Failed",
    "Flush",
    "Flushed",
    "Loading",
    "Operate",
    "Operated",
    "Outputs",
    "Ready",
    "Refused",
    "Shutdown",
    "Start",
    "Stats",
    "StatsReply",
    "ToEngine",
    "ToFront",
    "decode_to_engine",
    "decode_to_front",
    "frame",
]


class Start(msgspec.Struct, tag=True, frozen=True):
    """First message: what to build. `builder` is "module:function" (see `core_process`)."""

    builder: str
    config: Config
    eos_ids: tuple[int, ...]


class Add(msgspec.Struct, tag=True, frozen=True):
    """A new request."""

    request: GenerateRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for this request any more. Unknown or ended ones are ignored."""

    request_id: str


class Flush(msgspec.Struct, tag=True, frozen=True):
    """Forget what no running request holds; answered by `Flushed` with the same `call`."""

    call: int


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Answered by `StatsReply` with the same `call`."""

    call: int


class Operate(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Operated` with the same `call`."""

    call: int
    command: Command


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Abort what runs and exit with status 0."""


class Loading(msgspec.Struct, tag=True, frozen=True):
    """Progress of loading: `done` of `total` units of `phase`."""

    done: int
    total: int
    phase: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Loaded; requests may come."""

    facts: EngineFacts
    stats: EngineStats


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine process ends now. `config`: the user can mend it (ConfigError)."""

    message: str
    config: bool


class Outputs(msgspec.Struct, tag=True, frozen=True):
    """Everything one step has brought."""

    chunks: list[OutputChunk]


class Refused(msgspec.Struct, tag=True, frozen=True):
    """`Add` raised a UserError of this status."""

    request_id: str
    status: int
    message: str
    param: str | None
    code: str | None


class Flushed(msgspec.Struct, tag=True, frozen=True):
    call: int
    locked_pages: int


class StatsReply(msgspec.Struct, tag=True, frozen=True):
    call: int
    stats: EngineStats


class Operated(msgspec.Struct, tag=True, frozen=True):
    call: int
    reply: CommandReply


ToEngine: TypeAlias = Start | Add | Abort | Flush | Stats | Operate | Shutdown
ToFront: TypeAlias = Loading | Ready | Failed | Outputs | Refused | Flushed | StatsReply | Operated

_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_TO_FRONT: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def frame(message: ToEngine | ToFront) -> bytes:
    """A message as it goes over the wire."""
    return framed(_ENCODER.encode(message))


def decode_to_engine(body: bytes | memoryview) -> ToEngine:
    return _TO_ENGINE.decode(body)


def decode_to_front(body: bytes | memoryview) -> ToFront:
    return _TO_FRONT.decode(body)
