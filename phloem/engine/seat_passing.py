"""A rank's seat over a Unix socket: the descriptors themselves, and under which numbers they came.

one block of fixed size: the seat as JSON, padded; its descriptors travel beside it
"""

from __future__ import annotations

import socket

from phloem.engine.rank_seats import RankSeat

__all__ = ["receive_seat", "send_seat"]

_BLOCK_BYTES = 8192
_MAX_FDS = 253  # of one message, says the kernel; a seat of 64 ranks has 131


def send_seat(sock: socket.socket, seat: RankSeat) -> None:
    """Raises OSError if the other end is gone. This process keeps its own copies."""
    block = seat.to_json().encode().ljust(_BLOCK_BYTES)
    assert len(block) == _BLOCK_BYTES, f"a seat of {len(block)} bytes"
    sent = socket.send_fds(sock, [block], seat.fds)
    sock.sendall(block[sent:])


def receive_seat(sock: socket.socket) -> RankSeat:
    """What `send_seat` has sent, under this process's numbers. Raises ConnectionError at the end
    of the stream."""
    block, fds, _, _ = socket.recv_fds(sock, _BLOCK_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    if not block:
        raise ConnectionError("the leader has closed the connection")
    while len(block) < _BLOCK_BYTES:
        more = sock.recv(_BLOCK_BYTES - len(block))
        if not more:
            raise ConnectionError("the leader has closed the connection")
        block += more
    return RankSeat.from_json(block.decode()).renumbered(fds)
