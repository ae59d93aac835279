"""The storage protocol: keyed objects, batches on registered buffers, a deadline on every call.

    submit(op, deadline) -> ticket ----> poll() -> Done(ticket, one status per key)
                                              `-> released: tickets whose buffers are free again

Neither call waits for a backend, so the tier controller may call them between two steps. A ticket
is answered exactly once, at its deadline at the latest. If the backend still holds buffers of an
answered ticket (it timed out or was cancelled half-way), `Done.held` names the keys: those spans
are *quarantined* - not to be read as data, not to be written, not to be reused - until the ticket
appears in `Polled.released`.

Any status but OK is a miss: the caller recomputes. A put that was not answered OK is not served.
A get that was not answered OK may have left anything in its span.

A store that `caps.tells_gone` also says in `Polled.gone` which objects it has lost since: evicted,
damaged, removed by another process. Whoever remembers what is stored takes `done` first, then
`gone`; then what it remembers is as true as of this poll. The others never say; what they lost
shows when it is asked for.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

__all__ = [
    "KEY_BYTES",
    "Arena",
    "Caps",
    "Done",
    "Gone",
    "Op",
    "PageStore",
    "Polled",
    "Span",
    "Status",
    "StoreStats",
    "Ticket",
    "Verb",
]

KEY_BYTES = 48
Ticket: TypeAlias = int


class Verb(enum.Enum):
    """What an operation does with its keys."""

    PUT = "put"  # store; a key that is already there keeps its object (same key, same bytes)
    GET = "get"  # fill the span; the stored length must be the span's
    PROBE = "probe"  # OK or MISS; says nothing about a later GET (eviction may come between)
    DROP = "drop"  # forget; OK even if it was not there


class Status(enum.Enum):
    """The outcome for one key."""

    OK = "ok"
    MISS = "miss"
    BUSY = "busy"  # too much in flight: try later, or never
    FULL = "full"  # no room, or larger than the store takes
    TIMEOUT = "timeout"  # the deadline passed first
    CANCELLED = "cancelled"  # by `cancel`
    CORRUPT = "corrupt"  # the bytes are not what was put; the object is forgotten
    ERROR = "error"  # the backend failed
    DOWN = "down"  # not asked: the backend is taken to be dead, or the store is closed

    @property
    def is_failure(self) -> bool:
        """Whether the backend is to blame (counts against its health)."""
        return self in (Status.TIMEOUT, Status.CORRUPT, Status.ERROR)


class Span(NamedTuple):
    """A run of bytes in a registered arena."""

    arena: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Arena:
    """A registered, writable buffer that outlives the store (e.g. the host tier's memory)."""

    id: int
    view: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A batch. PUT and GET have one span per key; PROBE and DROP have none."""

    verb: Verb
    keys: tuple[bytes, ...]
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        for key in self.keys:
            if len(key) != KEY_BYTES:
                raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
        with_spans = self.verb in (Verb.PUT, Verb.GET)
        wanted = len(self.keys) if with_spans else 0
        if len(self.spans) != wanted:
            raise ValueError(
                f"{self.verb.value} of {len(self.keys)} keys wants {wanted} spans, "
                f"got {len(self.spans)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The answer to a ticket. `held`: positions of the keys whose spans are quarantined."""

    ticket: Ticket
    verb: Verb
    statuses: tuple[Status, ...]
    held: tuple[int, ...] = ()

    @property
    def num_leading_ok(self) -> int:
        """How many keys from the first one on are OK: what a prefix can use."""
        for index, status in enumerate(self.statuses):
            if status is not Status.OK:
                return index
        return len(self.statuses)


class Gone(NamedTuple):
    """Objects that went without a DROP. Never names a key that is there, or is under way.

    `overflowed`: more went than the store could remember to tell, so any key may be gone; what
    went afterwards is in `keys` again.
    """

    keys: tuple[bytes, ...] = ()
    overflowed: bool = False


class Polled(NamedTuple):
    """What happened since the last poll, each thing told once; `gone` is later than `done`."""

    done: tuple[Done, ...] = ()
    released: tuple[Ticket, ...] = ()
    gone: Gone = Gone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """What a backend can do."""

    name: str
    max_object_bytes: int
    persistent: bool = False  # objects survive this process
    verifies: bool = False  # checks content itself, end to end
    tells_gone: bool = False  # `Polled.gone` names what was evicted


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """A snapshot. Counters (`*_total`) only grow."""

    objects: int = 0
    used_bytes: int = 0  # what it occupies, its own headers and preallocation included
    capacity_bytes: int = 0  # the bound on used_bytes; 0 if unknown
    in_flight: int = 0  # tickets submitted and not yet answered
    held_spans: int = 0  # quarantined now
    read_bytes_total: int = 0
    written_bytes_total: int = 0
    evicted_objects_total: int = 0
    outcomes_total: tuple[tuple[Verb, Status, int], ...] = ()  # per key
    details_total: tuple[tuple[str, int], ...] = ()  # the backend's own counters, by name
    healthy: bool = True

    def count(self, verb: Verb, status: Status) -> int:
        """Keys of `verb` that ended as `status`."""
        return sum(n for v, s, n in self.outcomes_total if v is verb and s is status)

    def detail(self, name: str) -> int:
        """One of the backend's own counters, 0 if it has none of that name."""
        return dict(self.details_total).get(name, 0)


class PageStore(Protocol):
    """A store as the tier controller sees it. Called from one thread."""

    @property
    def caps(self) -> Caps: ...

    def attach(self, arenas: Sequence[Arena]) -> None:
        """Register buffers, once each. Spans name them by id."""
        ...

    def submit(self, op: Op, deadline_s: float) -> Ticket:
        """Start `op`; returns at once. `deadline_s` is a time of the store's clock.

        Raises ValueError for a span outside its arena. Whatever else is wrong comes as a status.
        """
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Answer the ticket now: what is finished keeps its status. Unknown tickets: nothing."""
        ...

    def poll(self) -> Polled:
        """Answers, releases and losses since the last call; returns at once."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until `poll` would bring answers or releases, at most `timeout_s` real seconds."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self, deadline_s: float) -> None:
        """Refuse new work, wait for what runs until the deadline, let go. Idempotent."""
        ...
