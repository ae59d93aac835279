"""What the leader and a rank's process say to each other until steps begin.

    leader              rank
    RankStart  ------->         what to load
               <------- RankHello     how many pages it could have
    RankPages  ------->         how many all ranks have: shared memory has its size now
               <------- RankReady     loaded; from now on `worker.wire`

At any time `RankFailed` is the rank's last message.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import msgspec

from phloem.config import Config
from phloem.core.errors import ConfigError, EngineDead
from phloem.worker import Wire

__all__ = [
    "FromRank",
    "RankFailed",
    "RankHello",
    "RankPages",
    "RankReady",
    "RankStart",
    "ToRank",
    "receive",
    "receive_start",
]


class RankStart(msgspec.Struct, tag=True, frozen=True):
    """The settings of the whole server."""

    config: Config


class RankHello(msgspec.Struct, tag=True, frozen=True):
    """Pages of each component that this rank could have."""

    pages: tuple[int, ...]


class RankPages(msgspec.Struct, tag=True, frozen=True):
    """Pages of each component: on the device of every rank, on the host of the machine."""

    device: tuple[int, ...]
    host: tuple[int, ...]


class RankReady(msgspec.Struct, tag=True, frozen=True):
    """What it has loaded; must be the same on all ranks."""

    kernels: str
    weight_bytes: int


class RankFailed(msgspec.Struct, tag=True, frozen=True):
    """The process ends. `config`: the user can mend it."""

    message: str
    config: bool


ToRank: TypeAlias = RankStart | RankPages
FromRank: TypeAlias = RankHello | RankReady | RankFailed

MessageT = TypeVar("MessageT")

_TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def receive_start(wire: Wire, kind: type[MessageT]) -> MessageT:
    """In a rank: the leader's next message. Raises EngineDead if the leader is gone."""
    body = next(wire.frames(), None)
    if body is None:
        raise EngineDead("the leader is gone")
    message = _TO_RANK.decode(body)
    assert isinstance(message, kind), f"expected {kind.__name__}, got {message!r}"
    return message


def receive(wire: Wire, kind: type[MessageT]) -> MessageT | None:
    """In the leader: a rank's next message, None if the rank is gone.

    Raises ConfigError or EngineDead if it says why it ends.
    """
    body = next(wire.frames(), None)
    if body is None:
        return None
    message = _FROM_RANK.decode(body)
    if isinstance(message, RankFailed):
        raise (ConfigError if message.config else EngineDead)(message.message)
    assert isinstance(message, kind), f"expected {kind.__name__}, got {message!r}"
    return message
