"""Doorbells between processes of one machine: sleep until a peer has written to shared memory.

One socket pair per pair of ranks. A byte on it wakes a sleeper; end of file says that the peer is
gone, at once and however it died, because nobody else holds its end.

No wake-up is lost: a sleeper says so (`sleeping[rank] = 1`), fences, and looks once more before it
sleeps; a writer writes, fences, and looks whether somebody sleeps. So a ring that nobody waits for
costs no system call.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import socket
import threading
from collections.abc import Callable

from phloem.core.errors import ConfigError

__all__ = ["Bells", "check_machine", "fence", "make_bells"]

_fence = threading.Lock()
_SPINS = 20  # a look costs about 1 us: longer would take the core that the peer needs


def fence() -> None:
    """Writes before it are visible before anything after it is read.

    An uncontended lock is a locked instruction, which is a full barrier on x86-64.
    """
    if _fence.acquire(blocking=False):
        _fence.release()


def check_machine() -> None:
    """Shared memory is published by plain stores, in order: true on x86-64, not on ARM."""
    machine = platform.machine().lower()
    if machine not in ("x86_64", "amd64"):
        raise ConfigError(f"groups over shared memory need an x86-64 machine, this is {machine}")


def make_bells(size: int) -> list[tuple[int, ...]]:
    """Per rank its descriptors, one per peer in order of rank; -1 in its own place."""
    fds = [[-1] * size for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            one, other = socket.socketpair()
            fds[low][high] = one.detach()
            fds[high][low] = other.detach()
    return [tuple(row) for row in fds]


def _always(_peer: int) -> bool:
    return True


class Bells:
    """One rank's ends. Owns the descriptors. One thread at a time sleeps."""

    def __init__(self, rank: int, fds: tuple[int, ...], sleeping: memoryview) -> None:
        """`sleeping`: one shared 8-byte word per rank."""
        self.gone: set[int] = set()
        self._rank = rank
        self._sleeping = sleeping
        self._sockets = {p: socket.socket(fileno=fd) for p, fd in enumerate(fds) if fd >= 0}
        self._peers = {sock.fileno(): peer for peer, sock in self._sockets.items()}
        self._self = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._self, select.POLLIN)
        for sock in self._sockets.values():
            sock.setblocking(False)
            os.set_inheritable(sock.fileno(), False)
            self._poll.register(sock.fileno(), select.POLLIN)

    def ring(self, waits: Callable[[int], bool] = _always) -> None:
        """Wake every peer that sleeps and `waits`. Called after the write that it may wait for."""
        fence()
        for peer, sock in self._sockets.items():
            if self._sleeping[peer] and waits(peer):
                # A full buffer is bell enough; a peer that is gone shows where it is waited for.
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    sock.send(b"!")

    def wake(self) -> None:
        """Wake this rank's own sleeper."""
        os.eventfd_write(self._self, 1)

    def sleep(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Return when `ready()`, at a bell, when a peer has gone, or after `timeout_s`."""
        for _ in range(_SPINS):
            if ready():
                return
        self._sleeping[self._rank] = 1
        fence()
        try:
            if not ready():
                self._heed(self._poll.poll(max(0.0, timeout_s) * 1e3))
        finally:
            self._sleeping[self._rank] = 0

    def _heed(self, events: list[tuple[int, int]]) -> None:
        for fd, _ in events:
            if fd == self._self:
                os.eventfd_read(fd)
                continue
            peer = self._peers[fd]
            try:
                rung = self._sockets[peer].recv(4096)
            except BlockingIOError:
                continue
            except ConnectionError:
                rung = b""
            if not rung:
                self._poll.unregister(fd)
                self.gone.add(peer)

    def close(self) -> None:
        """Give the descriptors back; peers see that this rank is gone. Not while one sleeps."""
        for sock in self._sockets.values():
            sock.close()
        if self._self >= 0:
            os.close(self._self)
            self._self = -1
