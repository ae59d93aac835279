"""The connection for page bytes between the host arena's machine and a rank that is elsewhere.

    leader                     rank
    Put, bytes    ------>          writes them into its pool
                  <------      one byte: written
    Get           ------>
                  <------      bytes
    LoadNews      ------>          nobody answers

Messages are frames (`core.frames`) of MessagePack; bytes of pages follow as they are, since both
ends know how many there are. A connection of its own: pages must not delay the records of steps.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from phloem.core.errors import GroupError
from phloem.core.frames import FRAME_HEAD, framed

__all__ = ["Get", "LiveLoad", "LoadNews", "Message", "PageLink", "Put"]

_Bytes: TypeAlias = npt.NDArray[np.uint8]
_ACK = b"\x06"


class Get(msgspec.Struct, tag=True, frozen=True):
    """Send these whole pages of a component. `slots`: int64, packed."""

    component: int
    slots: bytes


class Put(msgspec.Struct, tag=True, frozen=True):
    """Layers first_layer ... end_layer - 1 of a component's pages follow; write them."""

    component: int
    slots: bytes
    first_layer: int
    end_layer: int


class LiveLoad(msgspec.Struct, array_like=True, frozen=True):
    """A load that goes on: how many of its component's layers are on the device, on all ranks."""

    id: int
    component: int
    num_layers: int


class LoadNews(msgspec.Struct, tag=True, frozen=True):
    """Where loads are. `newest`: the highest id that there is; those up to it that are not `live`
    are over, complete or not."""

    newest: int
    live: tuple[LiveLoad, ...]


Message: TypeAlias = Get | Put | LoadNews

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def _nothing() -> None:
    """Nobody must know."""


class PageLink:
    """One end. Owns the socket. One thread uses it; any may close it.

    All but `close` raise GroupError, which names the other end, once it is gone or closed; after
    that at once. `num_bytes` counts the bytes of pages, both ways.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        rank: int,
        lost: Callable[[], None] = _nothing,
        patience_s: float | None = None,
    ) -> None:
        """`rank`: at the other end. `lost` is called when it breaks, but not by `close`.
        `patience_s`: so long the other end may say or take nothing; None: for ever."""
        self._sock, self._rank, self.lost = sock, rank, lost
        sock.settimeout(patience_s)
        self._using = threading.Lock()
        self._closed = False
        self._broken: str | None = None  # why; under _using
        self.num_bytes = 0

    def send(self, message: Message, data: _Bytes | None = None) -> None:
        """A message, and the bytes of pages that it announces."""
        with self._use() as sock:
            sock.sendall(framed(_ENCODER.encode(message)))
            if data is not None:
                sock.sendall(_flat(data))
                self.num_bytes += data.nbytes

    def receive(self) -> Message:
        """The next message; what it announces is to be taken with `receive_bytes`."""
        with self._use() as sock:
            head = bytearray(FRAME_HEAD.size)
            _receive(sock, memoryview(head))
            body = bytearray(FRAME_HEAD.unpack(head)[0])
            _receive(sock, memoryview(body))
        return _DECODER.decode(body)

    def send_bytes(self, data: _Bytes) -> None:
        """The answer to a Get."""
        with self._use() as sock:
            sock.sendall(_flat(data))
            self.num_bytes += data.nbytes

    def receive_bytes(self, into: _Bytes) -> None:
        """Fill the C-contiguous array with bytes of pages."""
        with self._use() as sock:
            _receive(sock, _flat(into))
            self.num_bytes += into.nbytes

    def send_ack(self) -> None:
        """The answer to a Put."""
        with self._use() as sock:
            sock.sendall(_ACK)

    def receive_ack(self) -> None:
        """Return when the oldest Put that is not acknowledged has been written."""
        with self._use() as sock:
            _receive(sock, memoryview(bytearray(len(_ACK))))

    def close(self) -> None:
        """Give it back; a thread that uses it has an error. From any thread; idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes who waits
        with self._using:
            self._sock.close()

    @contextlib.contextmanager
    def _use(self) -> Iterator[socket.socket]:
        with self._using:
            if self._broken is None:
                try:
                    yield self._sock
                    return
                except OSError as error:
                    self._broken = "it was closed here" if self._closed else str(error)
                if not self._closed:
                    self.lost()
            why = f"the connection for pages to rank {self._rank}: {self._broken}"
        raise GroupError(why, ranks=(self._rank,))


def _flat(data: _Bytes) -> memoryview:
    assert data.flags.c_contiguous, "bytes travel as they lie"
    return data.reshape(-1).data


def _receive(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view)
        if count == 0:
            raise ConnectionError("it has closed the connection")
        view = view[count:]
