"""What travels between the leader and the other ranks, and how: whole messages over a stream.

    leader --Step, Cancel, ... --> rank     frames (`core.frames`) of MessagePack
    leader <--Done, Failed, ... -- rank

One `Step` per step is all that a leader must send; nobody answers it but with `Done`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec
import numpy as np

from phloem.core.frames import FrameReader, framed
from phloem.core.plan import StepPlan, StepResult

__all__ = [
    "Cancel",
    "Done",
    "Down",
    "End",
    "Failed",
    "Load",
    "Loaded",
    "Measure",
    "Step",
    "Swap",
    "Up",
    "Wire",
    "packed",
]

_RECV_BYTES = 1 << 16
# A rank reads what it is sent at once, on a thread that does nothing else.
SEND_PATIENCE_S = 30


class Step(msgspec.Struct, tag=True, frozen=True):
    """`log`: commands since the last record, as `replica.pack` has them. `digest`: of the leader's
    state after them, to be compared; None: not now. `free`: its free pages by pool after them,
    which all ranks compare before the step; None: they do not."""

    plan: StepPlan
    log: bytes = b""
    digest: str | None = None
    free: dict[str, int] | None = None


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Nobody wants the results of this row any more."""

    serial: int


class Load(msgspec.Struct, tag=True, frozen=True):
    """Read another checkpoint, while steps go on; answered by `Loaded`."""

    path: str


class Swap(msgspec.Struct, tag=True, frozen=True):
    """After the steps sent so far: what was loaded last is what computes."""


class End(msgspec.Struct, tag=True, frozen=True):
    """The last message of a leader that ends in order. Who sees the wire close without it knows
    that something has failed."""


class Measure(msgspec.Struct, tag=True, frozen=True):
    """Before the first step: take part in the leader's measuring. Nobody answers."""


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The end of `Load`. `error`: one line, if it cannot be used."""

    error: str | None = None


class Done(msgspec.Struct, tag=True, frozen=True):
    """A finished step: the rows that this rank has sampled."""

    result: StepResult


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The rank runs no more plans. `hearsay`: because another one does not."""

    message: str
    hearsay: bool = False


Down: TypeAlias = Step | Cancel | Load | Swap | End | Measure
Up: TypeAlias = Done | Loaded | Failed


def _flat(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise NotImplementedError(f"{type(value)} does not travel")


def _array(_kind: Any, data: Any) -> Any:
    return np.frombuffer(data, dtype=np.int64)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_flat)
_DOWN: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down, dec_hook=_array)
_UP: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up, dec_hook=_array)


def packed(message: msgspec.Struct) -> bytes:
    """A message as it travels."""
    return framed(_ENCODER.encode(message))


class Wire:
    """One end of a stream. Owns the socket. One thread reads, any may send.

    `sent` counts messages.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        limit = struct.pack("ll", SEND_PATIENCE_S, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._sending = threading.Lock()
        self._frames = FrameReader()
        self.sent = 0

    def send(self, frame: bytes) -> None:
        """Send what `packed` returned. Raises OSError if the other end is gone or does not read."""
        with self._sending:
            self._sock.sendall(frame)
            self.sent += 1

    def down(self) -> Iterator[Down]:
        """What the leader sends, until it closes."""
        return map(_DOWN.decode, self.frames())

    def up(self) -> Iterator[Up]:
        """What a rank sends, until it closes."""
        return map(_UP.decode, self.frames())

    def frames(self) -> Iterator[bytes]:
        """The bodies of messages, until the other end closes."""
        frames = self._frames
        with contextlib.suppress(OSError):
            while True:
                while (body := frames.take()) is not None:
                    yield body
                data = self._sock.recv(_RECV_BYTES)
                if not data:
                    return
                frames.add(data)

    def shut(self) -> None:
        """Say that nothing more will be sent or read: both ends' readers end. Any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back; not while a thread reads."""
        self._sock.close()
