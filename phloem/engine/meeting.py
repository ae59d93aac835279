"""Where processes that somebody else has started meet, and how they get to each other.

    all        a store at MASTER_ADDR:MASTER_PORT: torchrun's, or one that rank 0 keeps
    leader     listens at MASTER_ADDR, on any free port; leaves port and secret in the store
    rank r     reads them, connects, and proves who it is (`engine.greeting`): once for messages,
               once for pages of tiers

Where all are on one machine, the leader listens at a Unix socket instead: memory can be passed on
over it. Where it is, no page travels.

The secret is new with every start and stands in the store alone: who may read that may join, so its
port is for machines that trust each other, as it is for all of torch.distributed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import queue
import socket
import threading
import time
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from phloem.config.launch import Launch
from phloem.core.errors import ConfigError, EngineDead
from phloem.engine.greeting import greet, present

__all__ = ["Meeting", "Met", "find_leader", "open_store"]

logger = logging.getLogger(__name__)

_KEY = "phloem/leader"
_LOOK_S = 0.1  # between two attempts to reach somebody who is not there yet
_PAGES = 1 << 16  # added to a rank's number where it greets for pages
# A machine that vanishes without a word is noticed after 10 + 3 * 5 seconds, and after as many
# milliseconds where it owes an answer to what it was sent.
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 25_000,
}


@dataclass(frozen=True, slots=True)
class Met:
    """A rank that the leader has taken in. `address`: its own, at which others reach it. `store`:
    of this start alone. `pages`: None where the leader sends a seat instead, and it is `seated`."""

    sock: socket.socket
    store: Store
    address: str
    pages: socket.socket | None

    @property
    def seated(self) -> bool:
        """Whether the leader sends it a seat: memory that all share."""
        return self.pages is None


def open_store(launch: Launch, timeout_s: float) -> Store:
    """The store of all processes. Blocks until it is there. Raises EngineDead if it never is."""
    where = f"{launch.address}:{launch.port}"
    kept = _listen(launch.address, launch.port).detach() if launch.keeps_store else None
    if kept is None and not _answers(launch.address, launch.port, timeout_s):
        raise EngineDead(
            f"rank {launch.rank} found nobody at {where} for {timeout_s:g} s: is rank 0 running, "
            "and do MASTER_ADDR and MASTER_PORT name its machine?"
        )
    try:
        return TCPStore(
            launch.address,
            launch.port,
            launch.size,
            is_master=launch.keeps_store,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=kept,
        )
    except RuntimeError as error:
        raise EngineDead(f"there is no store at {where}: {_line(error)}") from None


def _answers(address: str, port: int, timeout_s: float) -> bool:
    """Whether somebody listens there within the time. The store's own wait fills the screen."""
    deadline_s = time.monotonic() + timeout_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=left_s).close()
            return True
        except OSError:
            time.sleep(min(_LOOK_S, left_s))
    return False


class Meeting:
    """The leader's end: takes every rank in, once, and then nobody any more."""

    def __init__(self, launch: Launch, store: Store, *, seated: bool = False) -> None:
        """Listen, and tell. `seated`: everybody gets a seat.

        Raises ConfigError if MASTER_ADDR is no address of this machine.
        """
        self._size = launch.size
        self._secret = os.urandom(32)
        self._listener = _listen_here() if launch.on_one_machine else _listen(launch.address)
        self.address, self._place = _place_of(self._listener)
        ranks = range(1, launch.size)
        # By the numbers with which they greet.
        self._awaited = set(ranks) if seated else {*ranks, *(_PAGES + r for r in ranks)}
        self.pages: list[socket.socket] = []  # by rank, from `gather` on
        self._taken: set[int] = set()  # under _taking
        self._taking = threading.Lock()
        self._arrived: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        threading.Thread(target=self._accept, name="phloem-meeting", daemon=True).start()
        store.set(_KEY, _Card(self._place, self._secret, seated).to_json())
        self.store = _own_store(store, self._secret)

    def gather(self, timeout_s: float) -> list[socket.socket]:
        """Connections to ranks 1 ... size - 1, and in `pages` those for their pages. Raises
        EngineDead, which names who is missing."""
        deadline_s = time.monotonic() + timeout_s
        joined: dict[int, socket.socket] = {}
        try:
            while len(joined) < len(self._awaited):
                number, sock = self._arrived.get(timeout=max(0.0, deadline_s - time.monotonic()))
                joined[number] = sock
                if number < _PAGES:
                    logger.info("rank %d of %d has joined", number, self._size)
        except queue.Empty:
            for sock in joined.values():
                sock.close()
            missing = sorted({number % _PAGES for number in self._awaited - joined.keys()})
            raise EngineDead(self._missing(missing, timeout_s)) from None
        finally:
            self.close()
        self.pages = [joined[number] for number in sorted(joined) if number > _PAGES]
        return [joined[number] for number in sorted(joined) if number < _PAGES]

    def close(self) -> None:
        """Take nobody in any more. Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()

    def _missing(self, ranks: list[int], timeout_s: float) -> str:
        names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        have = "has" if len(ranks) == 1 else "have"
        return (
            f"{names} {have} not joined for {timeout_s:g} s (the leader listens at {self.address}"
            f":{self._place}); start all {self._size} processes, or raise --join-timeout-s"
        )

    def _accept(self) -> None:
        """Body of a thread. Each connection has one of its own: a mute stranger delays nobody."""
        with contextlib.suppress(OSError):  # closed
            while True:
                sock, peer = self._listener.accept()
                threading.Thread(target=self._greet, args=(sock, peer), daemon=True).start()

    def _greet(self, sock: socket.socket, peer: object) -> None:
        mine: list[int] = []

        def admit(number: int) -> str | None:
            rank = number % _PAGES
            with self._taking:
                if number not in self._awaited:
                    return f"there is no rank {rank} of {self._size} to join"
                if number in self._taken:
                    return f"there is a rank {rank} already"
                self._taken.add(number)
            mine.append(number)
            return None

        try:
            _prepare(sock)
            number = greet(sock, self._secret, admit)
        except OSError as error:  # also ConnectionError
            logger.warning("%s was refused: %s", peer or "somebody here", error)
            with self._taking:
                self._taken.difference_update(mine)
            sock.close()
            return
        self._arrived.put((number, sock))


def find_leader(launch: Launch, store: Store, timeout_s: float) -> Met:
    """A rank's end. Raises EngineDead if it finds no leader in time, or one that refuses it."""
    deadline_s = time.monotonic() + timeout_s
    why = "it is not there yet"
    while (left_s := deadline_s - time.monotonic()) > 0:
        card = _card(store)
        try:
            sock = None if card is None else _connect(launch.address, card.place, left_s)
        except OSError as error:  # also a card that a leader before this one has left
            why = f"{launch.address}:{card.place if card else ''}: {error.strerror or error}"
            sock = None
        if card is None or sock is None:
            time.sleep(min(_LOOK_S, left_s))
            continue
        _present(sock, card, launch, launch.rank)
        pages = None if card.seated else _join_for_pages(launch, card, sock, left_s)
        return Met(sock, _own_store(store, card.secret), _place_of(sock)[0], pages)
    raise EngineDead(f"rank {launch.rank} could not reach the leader for {timeout_s:g} s: {why}")


def _join_for_pages(
    launch: Launch, card: _Card, joined: socket.socket, timeout_s: float
) -> socket.socket:
    """The other connection of a rank that has `joined`, which is given up if this one fails."""
    try:
        pages = _connect(launch.address, card.place, timeout_s)
        _present(pages, card, launch, _PAGES + launch.rank)
    except (OSError, EngineDead) as error:
        joined.close()
        raise EngineDead(f"rank {launch.rank} has lost the leader: {error}") from None
    return pages


def _present(sock: socket.socket, card: _Card, launch: Launch, number: int) -> None:
    """Raises EngineDead if the leader does not want it, or is not the one."""
    try:
        _prepare(sock)
        present(sock, card.secret, number)
    except OSError as error:
        sock.close()
        raise EngineDead(f"the leader does not take rank {launch.rank}: {error}") from None


@dataclass(frozen=True, slots=True)
class _Card:
    """What the leader leaves in the store. `place`: a port, or the name of a Unix socket. `seated`:
    everybody gets a seat."""

    place: int | str
    secret: bytes
    seated: bool

    def to_json(self) -> str:
        fields = {"place": self.place, "secret": self.secret.hex(), "seated": self.seated}
        return json.dumps(fields)


def _card(store: Store) -> _Card | None:
    """None: not there yet."""
    try:
        if not store.check([_KEY]):
            return None
        fields = json.loads(store.get(_KEY))
    except RuntimeError as error:
        raise EngineDead(f"the store is gone: {_line(error)}") from None
    return _Card(fields["place"], bytes.fromhex(fields["secret"]), fields["seated"])


def _own_store(store: Store, secret: bytes) -> Store:
    """Nothing that an earlier start has left in the store is taken for this one's."""
    return PrefixStore(f"phloem/{secret[:8].hex()}", store)


def _listen(address: str, port: int = 0) -> socket.socket:
    """At this address alone; port 0: any free one."""
    try:
        infos = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        family, _, _, _, place = infos[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR {address}: {error.strerror or error}") from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(place)
        sock.listen()
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen at MASTER_ADDR {address}, port {port or 'any'}: "
            f"{error.strerror or error}; it must be an address of rank 0's machine, and the port "
            "free"
        ) from None
    return sock


def _listen_here() -> socket.socket:
    """For processes of this machine, under a name that goes when this process does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(f"\0phloem-{os.urandom(16).hex()}")
    sock.listen()
    return sock


def _place_of(sock: socket.socket) -> tuple[str, int | str]:
    """The address of a socket, and its port; of a Unix socket, the name instead."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return "this machine", os.fsdecode(name)[1:]  # who connects has no name
    return name[0], name[1]


def _connect(address: str, place: int | str, timeout_s: float) -> socket.socket:
    if isinstance(place, int):
        return socket.create_connection((address, place), timeout=timeout_s)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(f"\0{place}")
    except OSError:
        sock.close()
        raise
    return sock


def _prepare(sock: socket.socket) -> None:
    """A record must not wait for the answer to the one before; who is gone must show."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _line(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0]
