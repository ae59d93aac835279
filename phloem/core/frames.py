"""How messages travel over a byte stream: a little-endian uint32 length, then so many bytes."""

from __future__ import annotations

import struct

__all__ = ["FRAME_HEAD", "FrameReader", "framed"]

FRAME_HEAD = struct.Struct("<I")


def framed(body: bytes) -> bytes:
    """A message as it travels."""
    return FRAME_HEAD.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into the bodies of messages, however it arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> None:
        """What has arrived next."""
        self._buffer += data

    def take(self) -> bytes | None:
        """The oldest body that is complete and was not taken yet; None if there is none."""
        buffer = self._buffer
        if len(buffer) < FRAME_HEAD.size:
            return None
        end = FRAME_HEAD.size + FRAME_HEAD.unpack_from(buffer)[0]
        if end > len(buffer):
            return None
        body = bytes(buffer[FRAME_HEAD.size : end])
        del buffer[:end]  # moves nothing: a bytearray remembers where it begins
        return body

    def feed(self, data: bytes) -> list[bytes]:
        """`add`, and all bodies that are complete now, in order."""
        self.add(data)
        bodies = []
        while (body := self.take()) is not None:
            bodies.append(body)
        return bodies
