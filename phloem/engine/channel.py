"""The front's side of the socket, on an event loop: whole messages in and out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from phloem.core.frames import FrameReader
from phloem.engine import messages as msg

__all__ = ["Channel"]


class Channel(asyncio.Protocol):
    """Frames and decodes. `on_message` and `on_closed` are called from the event loop."""

    def __init__(
        self,
        frames: FrameReader,
        on_message: Callable[[msg.ToFront], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._frames = frames
        self._on_message = on_message
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not all loops' transports inherit from asyncio's class (uvloop's do not).
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._on_message(msg.decode_to_front(body))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (asyncio's)
        self._on_closed()

    def send(self, message: msg.ToEngine) -> None:
        """Write now, or as soon as the socket takes it; never blocks. Ignored once closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(msg.frame(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
