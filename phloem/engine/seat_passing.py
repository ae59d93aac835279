"""A rank's seat over a Unix socket: the descriptors themselves, and under which numbers they came.

one block of fixed size: the seat as JSON, padded; its descriptors travel beside it
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from phloem.engine.rank_seats import RankSeat

__all__ = ["receive_block", "receive_seat", "send_block", "send_seat"]

_BLOCK_BYTES = 8192
_MAX_FDS = 253  # of one message, says the kernel; a seat of 64 ranks has 131


def send_seat(sock: socket.socket, seat: RankSeat) -> None:
    """Raises OSError if the other end is gone. This process keeps its own copies."""
    send_block(sock, seat.to_json(), seat.fds)


def receive_seat(sock: socket.socket) -> RankSeat:
    """What `send_seat` has sent, under this process's numbers. Raises ConnectionError at the end
    of the stream."""
    text, fds = receive_block(sock)
    return RankSeat.from_json(text).renumbered(fds)


def send_block(sock: socket.socket, text: str, fds: Sequence[int]) -> None:
    """A description of descriptors, and these. As `send_seat`."""
    block = text.encode().ljust(_BLOCK_BYTES)
    assert len(block) == _BLOCK_BYTES, f"a seat of {len(block)} bytes"
    sent = socket.send_fds(sock, [block], fds)
    if sent < len(block):  # who has all of it may have gone: even nothing could not be sent
        sock.sendall(block[sent:])


def receive_block(sock: socket.socket) -> tuple[str, list[int]]:
    """What `send_block` has sent; the descriptors under this process's numbers. Raises
    ConnectionError at the end of the stream."""
    block, fds, _, _ = socket.recv_fds(sock, _BLOCK_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    if not block:
        raise ConnectionError("the other end has closed the connection")
    while len(block) < _BLOCK_BYTES:
        more = sock.recv(_BLOCK_BYTES - len(block))
        if not more:
            raise ConnectionError("the other end has closed the connection")
        block += more
    return block.decode(), list(fds)
