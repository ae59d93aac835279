"""What an operator asks of a running engine, beside requests. Each command has one reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

__all__ = [
    "AttachStorage",
    "ClearCache",
    "Command",
    "CommandReply",
    "DetachStorage",
    "ListCache",
    "ListDecisions",
    "ListRemote",
    "Reply",
    "UpdateWeights",
    "VerifyCache",
]


class AttachStorage(msgspec.Struct, tag=True, frozen=True):
    """Open a storage directory and use it. Refused if one is attached."""

    directory: str
    size_bytes: int


class DetachStorage(msgspec.Struct, tag=True, frozen=True):
    """Stop using the storage directory; what is there stays there."""


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Serve another checkpoint of the same architecture from now on.

    Requests that came before are answered by the old weights, those that come meanwhile wait.
    """

    path: str


class ListCache(msgspec.Struct, tag=True, frozen=True):
    """The largest cached prefixes."""

    limit: int


class ListDecisions(msgspec.Struct, tag=True, frozen=True):
    """What was decided about the newest requests' cached pages; of one request, if it is named."""

    limit: int
    request_id: str | None = None


class ListRemote(msgspec.Struct, tag=True, frozen=True):
    """How the newest steps read pages of other ranks, and what was expected of each way."""

    limit: int


class VerifyCache(msgspec.Struct, tag=True, frozen=True):
    """Check the cache's invariants."""


class ClearCache(msgspec.Struct, tag=True, frozen=True):
    """Forget the pages on device and host that no running request holds; `storage`: those too."""

    storage: bool


Command: TypeAlias = (
    AttachStorage
    | DetachStorage
    | UpdateWeights
    | ListCache
    | ListDecisions
    | ListRemote
    | VerifyCache
    | ClearCache
)


class CommandReply(msgspec.Struct, frozen=True):
    """`error`: one line, if it was refused; `result`: facts as JSON has them."""

    result: dict[str, Any] = {}
    error: str | None = None


Reply: TypeAlias = Callable[[CommandReply], None]
