"""Makes a blocking backend a PageStore: worker threads, deadlines, quarantine.

    submit --> [queue of parts] --> thread: backend.get(part) --> statuses --> poll
                   |                    |
      deadline: dropped, its         deadline: answered TIMEOUT, its buffers held
      buffers are free at once       until the thread comes back (then released)

A thread that is past its deadline is *stuck*; so that one hung call does not stop all others, up
to `num_threads` spare threads take the place of stuck ones.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

from phloem.core.clock import Clock
from phloem.core.store import (
    Arena,
    Caps,
    Done,
    Gone,
    Op,
    Polled,
    Span,
    Status,
    StoreStats,
    Ticket,
    Verb,
)
from phloem.stores.backend import Backend, Item

__all__ = ["ThreadedStore"]

logger = logging.getLogger(__name__)

# A part is what one thread does in one call: enough for one large sequential I/O.
PART_BYTES = 4 << 20
PART_KEYS = 256


class _Part:
    """Some keys of one flight, done by one thread."""

    __slots__ = ("expired", "first", "flight", "items", "running")

    def __init__(self, flight: _Flight, first: int, items: list[Item]) -> None:
        self.flight = flight
        self.first = first
        self.items = items
        self.running = False
        self.expired = False


class _Flight:
    """A ticket that is not answered, or that still holds buffers."""

    __slots__ = ("num_open", "op", "parts", "reported", "statuses", "ticket")

    def __init__(self, ticket: Ticket, op: Op) -> None:
        self.ticket = ticket
        self.op = op
        self.statuses: list[Status | None] = [None] * len(op.keys)
        self.parts: list[_Part] = []
        self.num_open = 0  # parts that are queued or running
        self.reported = False


class ThreadedStore:
    """A PageStore over a blocking backend. `num_threads` calls run at once."""

    def __init__(
        self, backend: Backend, clock: Clock, *, num_threads: int = 4, max_in_flight: int = 256
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._num_threads = num_threads
        self._max_in_flight = max_in_flight
        self._arenas: dict[int, memoryview] = {}
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # for those who wait for answers
        self._work_ready = threading.Condition(lock)  # for idle threads
        # All below: under the lock of both.
        self._next_ticket = 1
        self._flights: dict[Ticket, _Flight] = {}
        self._deadlines: list[tuple[float, Ticket]] = []
        self._queue: deque[_Part] = deque()
        self._done: list[Done] = []
        self._released: list[Ticket] = []
        self._held: dict[Ticket, list[Span]] = {}
        self._outcomes: Counter[tuple[Verb, Status]] = Counter()
        self._bytes: Counter[Verb] = Counter()
        self._num_alive = 0
        self._num_stuck = 0
        self._closed = False
        self._backend_closed = False

    @property
    def caps(self) -> Caps:
        return self._backend.caps

    def attach(self, arenas: Sequence[Arena]) -> None:
        for arena in arenas:
            if arena.view.readonly or arena.view.format != "B" or not arena.view.contiguous:
                raise ValueError(f"arena {arena.id} must be a writable, contiguous view of bytes")
            if arena.id in self._arenas:
                raise ValueError(f"arena {arena.id} is attached already")
            self._arenas[arena.id] = arena.view

    def submit(self, op: Op, deadline_s: float) -> Ticket:
        items = [Item(key, ()) for key in op.keys]
        if op.spans:
            views = [self._view(span) for span in op.spans]
            items = [Item(key, (view,)) for key, view in zip(op.keys, views, strict=True)]
        with self._changed:
            ticket = self._next_ticket
            self._next_ticket += 1
            flight = _Flight(ticket, op)
            refusal = self._refusal(op)
            if refusal is not None:
                flight.statuses = [refusal] * len(op.keys)
            elif items:
                self._enqueue(flight, items, deadline_s)
            if flight.num_open == 0:
                self._report(flight)
            return ticket

    def _view(self, span: Span) -> memoryview:
        arena = self._arenas.get(span.arena)
        if arena is None:
            raise ValueError(f"no arena {span.arena} is attached")
        if span.offset < 0 or span.length < 0 or span.offset + span.length > len(arena):
            raise ValueError(f"{span} is outside its arena of {len(arena)} bytes")
        return arena[span.offset : span.offset + span.length]

    def _refusal(self, op: Op) -> Status | None:
        if self._closed:
            return Status.DOWN
        if len(self._flights) >= self._max_in_flight:
            return Status.BUSY
        held = [span for spans in self._held.values() for span in spans]
        if held and any(_overlap(mine, theirs) for mine in op.spans for theirs in held):
            return Status.BUSY
        return None

    def _enqueue(self, flight: _Flight, items: list[Item], deadline_s: float) -> None:
        for first, end in _cuts(flight.op.spans, len(items)):
            part = _Part(flight, first, items[first:end])
            flight.parts.append(part)
            self._queue.append(part)
        flight.num_open = len(flight.parts)
        self._flights[flight.ticket] = flight
        heapq.heappush(self._deadlines, (deadline_s, flight.ticket))
        self._keep_threads()
        self._work_ready.notify(len(flight.parts))

    def _keep_threads(self) -> None:
        """As many threads as wanted beside the stuck ones, within bounds."""
        wanted = min(self._num_threads + self._num_stuck, 2 * self._num_threads)
        while self._num_alive < wanted:
            self._num_alive += 1
            name = f"store-{self._backend.caps.name}-{self._num_alive}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (part := self._next_part()) is not None:
            self._finish(part, self._execute(part))

    def _next_part(self) -> _Part | None:
        """Wait for work. None: this thread is not needed any more."""
        with self._changed:
            while True:
                surplus = self._num_alive - self._num_stuck > self._num_threads
                if (self._closed and not self._queue) or surplus:
                    self._num_alive -= 1
                    self._close_backend_if_idle()
                    self._work_ready.notify()  # what woke this one was meant for another
                    self._changed.notify_all()
                    return None
                if self._queue:
                    part = self._queue.popleft()
                    part.running = True
                    return part
                self._work_ready.wait()

    def _execute(self, part: _Part) -> list[Status]:
        verb = part.flight.op.verb
        keys = [item.key for item in part.items]
        try:
            if verb is Verb.PUT:
                return self._backend.put(part.items)
            if verb is Verb.GET:
                return self._backend.get(part.items)
            return self._backend.probe(keys) if verb is Verb.PROBE else self._backend.drop(keys)
        except Exception as error:  # the thread's entry point: a backend must not end the service
            logger.warning("%s of %d keys failed: %r", verb.value, len(keys), error)
            return [Status.ERROR] * len(keys)

    def _finish(self, part: _Part, statuses: list[Status]) -> None:
        flight = part.flight
        with self._changed:
            if not part.expired:
                flight.statuses[part.first : part.first + len(statuses)] = statuses
                if flight.op.spans:
                    self._bytes[flight.op.verb] += _num_ok_bytes(part.items, statuses)
                self._ended(part)
                return
        if flight.op.verb is Verb.PUT:
            self._withdraw(part, statuses)
        with self._changed:
            self._num_stuck -= 1
            self._ended(part)

    def _ended(self, part: _Part) -> None:
        """No thread works for the part any more."""
        flight = part.flight
        part.running = False
        flight.num_open -= 1
        if flight.num_open == 0:
            self._settle(flight)
            self._changed.notify_all()

    def _withdraw(self, part: _Part, statuses: list[Status]) -> None:
        """A put that was answered TIMEOUT has succeeded after all: it shall not be seen."""
        late = [i.key for i, s in zip(part.items, statuses, strict=True) if s is Status.OK]
        try:
            self._backend.drop(late)
        except Exception as error:  # as in _execute
            logger.warning("could not withdraw %d late objects: %r", len(late), error)

    def _settle(self, flight: _Flight) -> None:
        """No thread works for the flight any more."""
        if not flight.reported:
            self._report(flight)
            return
        self._flights.pop(flight.ticket, None)
        if self._held.pop(flight.ticket, None) is not None:
            self._released.append(flight.ticket)

    def _report(self, flight: _Flight) -> None:
        """Answer the ticket. What still runs holds its buffers."""
        flight.reported = True
        held = [
            index
            for part in flight.parts
            if part.running
            for index in range(part.first, part.first + len(part.items))
            if flight.op.spans
        ]
        statuses = tuple(status or Status.ERROR for status in flight.statuses)
        for status in statuses:
            self._outcomes[flight.op.verb, status] += 1
        self._done.append(
            Done(ticket=flight.ticket, verb=flight.op.verb, statuses=statuses, held=tuple(held))
        )
        if held:
            self._held[flight.ticket] = [flight.op.spans[index] for index in held]
        if flight.num_open == 0:
            self._flights.pop(flight.ticket, None)

    def cancel(self, ticket: Ticket) -> None:
        with self._changed:
            self._expire(ticket, Status.CANCELLED)

    def _expire(self, ticket: Ticket, status: Status) -> None:
        """Answer a ticket before it is done: what is queued is dropped, what runs is held."""
        flight = self._flights.get(ticket)
        if flight is None or flight.reported:
            return
        for part in flight.parts:
            if part.running:
                part.expired = True
                self._num_stuck += 1
        queued = [part for part in self._queue if part.flight is flight]
        for part in queued:
            self._queue.remove(part)
        flight.num_open -= len(queued)
        flight.statuses = [status if old is None else old for old in flight.statuses]
        self._report(flight)
        self._keep_threads()
        self._changed.notify_all()

    def _expire_due(self) -> None:
        now = self._clock.now_s()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, ticket = heapq.heappop(self._deadlines)
            self._expire(ticket, Status.TIMEOUT)

    def poll(self) -> Polled:
        with self._changed:
            self._expire_due()
            polled = Polled(tuple(self._done), tuple(self._released), self._gone())
            self._done.clear()
            self._released.clear()
            return polled

    def _gone(self) -> Gone:
        """Losses, but not of keys whose answer is still to come: it may be older than the loss."""
        open_keys: set[bytes] | None = None

        def under_way(key: bytes) -> bool:
            nonlocal open_keys
            if open_keys is None:
                unanswered = (f for f in self._flights.values() if not f.reported)
                open_keys = {key for flight in unanswered for key in flight.op.keys}
            return key in open_keys

        return self._backend.gone(under_way)

    def wait(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        with self._changed:
            while not (self._done or self._released):
                self._expire_due()
                left = end - time.monotonic()
                if self._done or self._released or left <= 0:
                    return
                if self._deadlines:
                    left = min(left, max(0.0, self._deadlines[0][0] - self._clock.now_s()) + 1e-4)
                self._changed.wait(left)

    def stats(self) -> StoreStats:
        usage = self._backend.usage()
        with self._changed:
            return StoreStats(
                objects=usage.objects,
                used_bytes=usage.used_bytes,
                capacity_bytes=usage.capacity_bytes,
                in_flight=sum(not flight.reported for flight in self._flights.values()),
                held_spans=sum(len(spans) for spans in self._held.values()),
                read_bytes_total=self._bytes[Verb.GET],
                written_bytes_total=self._bytes[Verb.PUT],
                evicted_objects_total=usage.evicted_objects,
                outcomes_total=tuple((v, s, n) for (v, s), n in self._outcomes.items()),
                details_total=usage.details,
            )

    def close(self, deadline_s: float) -> None:
        with self._changed:
            self._closed = True
            self._work_ready.notify_all()
            while self._num_alive > self._num_stuck:
                self._expire_due()
                left = deadline_s - self._clock.now_s()
                if left <= 0:
                    break
                self._changed.wait(min(left, 0.05))  # a virtual clock cannot wake us
            for ticket in list(self._flights):
                self._expire(ticket, Status.DOWN)
            self._close_backend_if_idle()

    def _close_backend_if_idle(self) -> None:
        """A stuck thread may still use the backend's files: then it closes it when it returns."""
        if self._closed and self._num_alive == 0 and not self._backend_closed:
            self._backend_closed = True
            self._backend.close()


def _cuts(spans: Sequence[Span], num_keys: int) -> list[tuple[int, int]]:
    """Cut a batch into parts of bounded bytes and keys, as (first, end)."""
    cuts = []
    first = 0
    total = 0
    for index in range(num_keys):
        length = spans[index].length if spans else 0
        if index > first and (total + length > PART_BYTES or index - first >= PART_KEYS):
            cuts.append((first, index))
            first, total = index, 0
        total += length
    cuts.append((first, num_keys))
    return cuts


def _num_ok_bytes(items: Sequence[Item], statuses: Sequence[Status]) -> int:
    pairs = zip(items, statuses, strict=True)
    return sum(len(item.parts[0]) for item, status in pairs if status is Status.OK)


def _overlap(a: Span, b: Span) -> bool:
    return a.arena == b.arena and a.offset < b.offset + b.length and b.offset < a.offset + a.length
