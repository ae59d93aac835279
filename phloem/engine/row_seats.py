"""Seats in shared memory for a row of ranks that are on one machine, though others are not.

    each         says on which machine it is (`machine_name`)
    first rank   makes the seats, listens at a Unix socket, and leaves name and secret in the store
    another      connects, proves that it knows the secret, and gets its seat, descriptors included

A row adds up twice in every layer, over a network some five times slower.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from torch._C._distributed_c10d import Store

from phloem.core.errors import GroupError
from phloem.engine.greeting import greet, present
from phloem.engine.seat_passing import receive_block, send_block
from phloem.groups import GroupSeat, shm_seats

__all__ = ["machine_name", "named", "row_seat"]

_KEY = "seats"
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def machine_name() -> str:
    """The same for two processes if they can share memory over a Unix socket; empty if this one can
    with nobody."""
    if platform.machine().lower() not in ("x86_64", "amd64"):  # as `groups.bells` needs it
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = os.stat("/proc/self/ns/net").st_ino  # where names of Unix sockets hold
    except OSError:
        return ""
    return f"{boot}/{network}/{os.getuid()}"


def row_seat(
    store: Store, ranks: Sequence[int], rank: int, *, timeout_s: float, deadline_s: float
) -> GroupSeat:
    """The seat of `rank` among `ranks`, which are on one machine; each of them calls it.

    `store`: for them alone. `timeout_s`: of the group; `deadline_s`: of the meeting, by the
    monotonic clock. Raises GroupError if one of them does not come by then.
    """
    if rank == ranks[0]:
        return _give(store, ranks, timeout_s, deadline_s)
    try:
        store.wait([_KEY], datetime.timedelta(seconds=_left_s(deadline_s)))
        card = json.loads(store.get(_KEY))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_left_s(deadline_s))
            sock.connect(f"\0{card['name']}")
            present(sock, bytes.fromhex(card["secret"]), rank)
            sock.settimeout(_left_s(deadline_s))
            text, fds = receive_block(sock)
    except (OSError, RuntimeError) as error:
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise GroupError(f"rank {rank} has got no seat in its row: {why[0]}") from None
    return _renumbered(text, fds)


def _give(store: Store, ranks: Sequence[int], timeout_s: float, deadline_s: float) -> GroupSeat:
    """Pass all seats on but the first one, which is this rank's."""
    own, *others = shm_seats(len(ranks), axis="tp", timeout_s=timeout_s, members=ranks)
    waiting = dict(zip(ranks[1:], others, strict=True))
    name, secret = f"phloem-row-{os.urandom(16).hex()}", os.urandom(32)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            store.set(_KEY, json.dumps({"name": name, "secret": secret.hex()}))
            while waiting:
                listener.settimeout(_left_s(deadline_s))
                sock, _ = listener.accept()
                with sock, contextlib.suppress(ConnectionError):  # a stranger
                    _serve(sock, secret, waiting)
    except (OSError, RuntimeError):
        own.close()
        ranks = tuple(waiting)
        raise GroupError(f"{named(ranks)} not come for a seat in the row", ranks=ranks) from None
    finally:
        for seat in others:
            seat.close()
    return own


def _serve(sock: socket.socket, secret: bytes, waiting: dict[int, GroupSeat]) -> None:
    """Give a rank its seat, once. Raises ConnectionError for a stranger."""
    peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(peer)[1] != os.getuid():  # not even heard: it might be mute
        raise ConnectionError("it is of another user")

    def admit(rank: int) -> str | None:
        return None if rank in waiting else f"there is no seat for rank {rank}"

    rank = greet(sock, secret, admit)
    seat = waiting[rank]
    send_block(sock, json.dumps(dataclasses.asdict(seat)), seat.fds)
    del waiting[rank]


def _renumbered(text: str, fds: Sequence[int]) -> GroupSeat:
    """A seat as it was sent, under this process's numbers."""
    fields = json.loads(text)
    bells, members = tuple(fields["bells"]), tuple(fields["members"])
    seat = GroupSeat(**(fields | {"bells": bells, "members": members}))
    number = dict(zip(seat.fds, fds, strict=True)) | {-1: -1}
    return dataclasses.replace(
        seat, memory=number[seat.memory], bells=tuple(number[fd] for fd in bells)
    )


def named(ranks: Sequence[int]) -> str:
    """Ranks that have done something, or not: the sentence goes on."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks))} have"


def _left_s(deadline_s: float) -> float:
    return max(1e-3, deadline_s - time.monotonic())
