"""How messages travel over a byte stream: a little-endian uint32 length, then so many bytes."""

from __future__ import annotations

import struct

__all__ = ["FrameReader", "framed"]

_LENGTH = struct.Struct("<I")


def framed(body: bytes) -> bytes:
    """A message as it travels."""
    return _LENGTH.pack(len(body)) + body


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
        if len(buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
        if end > len(buffer):
            return None
        body = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]  # moves nothing: a bytearray remembers where it begins
        return body

    def feed(self, data: bytes) -> list[bytes]:
        """`add`, and all bodies that are complete now, in order."""
        self.add(data)
        bodies = []
        while (body := self.take()) is not None:
            bodies.append(body)
        return bodies
