"""A store with one arena, driven synchronously; what the tests of all stores share."""

from __future__ import annotations

import hashlib
import mmap
import random
from collections.abc import Callable, Sequence
from types import TracebackType

from phloem.core.clock import MonotonicClock, VirtualClock
from phloem.core.store import KEY_BYTES, Arena, Done, Op, PageStore, Span, Status, Ticket, Verb
from phloem.stores import Backend, GuardPolicy, Item, guarded
from phloem.stores.faulty import FaultyBackend

OK, MISS = Status.OK, Status.MISS
ARENA_BYTES = 4 << 20
PATIENCE_S = 60.0  # of a test, on a busy machine


def key_of(name: int | str) -> bytes:
    """A key like the engine's: no structure, always the same for the same name."""
    return hashlib.sha512(str(name).encode()).digest()[:KEY_BYTES]


def bytes_of(name: int | str, length: int) -> bytes:
    """The only right content of an object: follows from its name."""
    return random.Random(f"{name}/{length}").randbytes(length)


class Rig:
    """put, get, probe and drop by name, each waiting for its answer; closes the store at the end.

    Objects lie back to back from `base` in the arena; an odd base is an unaligned buffer.
    """

    def __init__(self, store: PageStore, clock: MonotonicClock | VirtualClock) -> None:
        self.store = store
        self.clock = clock
        self.map = mmap.mmap(-1, ARENA_BYTES)
        self.view = memoryview(self.map)
        store.attach([Arena(0, self.view)])
        self.asked: dict[Ticket, tuple[bytes, ...]] = {}
        self.answers: dict[Ticket, Done] = {}
        self.released: list[Ticket] = []
        self.gone: set[bytes] = set()  # told, and not answered OK since

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.store.close(self.clock.now_s() + PATIENCE_S)

    def spans(self, lengths: Sequence[int], base: int = 0) -> tuple[Span, ...]:
        out = []
        for length in lengths:
            out.append(Span(0, base, length))
            base += length
        return tuple(out)

    def submit(self, op: Op, within_s: float = PATIENCE_S) -> Ticket:
        ticket = self.store.submit(op, self.clock.now_s() + within_s)
        self.asked[ticket] = op.keys
        return ticket

    def pump(self, timeout_s: float = 0.0) -> None:
        """One poll; every ticket must be answered and released once at most."""
        if timeout_s:
            self.store.wait(timeout_s)
        polled = self.store.poll()
        for done in polled.done:
            assert done.ticket not in self.answers, "answered twice"
            self.answers[done.ticket] = done
            for key, status in zip(self.asked.pop(done.ticket), done.statuses, strict=True):
                if status is OK and done.verb is not Verb.DROP:
                    self.gone.discard(key)
        for ticket in polled.released:
            assert ticket not in self.released, "released twice"
            assert self.answers[ticket].held, "released without having been held"
            self.released.append(ticket)
        self.gone.update(polled.gone.keys)

    def until(self, condition: Callable[[], bool], step_s: float = 0.05) -> None:
        end = MonotonicClock().now_s() + PATIENCE_S
        while not condition():
            assert MonotonicClock().now_s() < end, "no progress"
            self.pump(step_s)

    def answer(self, ticket: Ticket) -> Done:
        self.until(lambda: ticket in self.answers)
        return self.answers[ticket]

    def run(self, op: Op) -> tuple[Status, ...]:
        return self.answer(self.submit(op)).statuses

    def put_op(self, names: Sequence[int | str], length: int, base: int = 0) -> Op:
        """Fill the arena with the objects' content; the op that stores it."""
        spans = self.spans([length] * len(names), base)
        for name, span in zip(names, spans, strict=True):
            self.view[span.offset : span.offset + length] = bytes_of(name, length)
        return Op(verb=Verb.PUT, keys=tuple(map(key_of, names)), spans=spans)

    def get_op(self, names: Sequence[int | str], length: int, base: int = 0) -> Op:
        """Blank the arena; the op that fills it."""
        spans = self.spans([length] * len(names), base)
        self.view[base : base + length * len(names)] = bytes(length * len(names))
        return Op(verb=Verb.GET, keys=tuple(map(key_of, names)), spans=spans)

    def put(self, names: Sequence[int | str], length: int, base: int = 0) -> tuple[Status, ...]:
        return self.run(self.put_op(names, length, base))

    def get(self, names: Sequence[int | str], length: int, base: int = 0) -> tuple[Status, ...]:
        """Read; whatever is answered OK must be the one right content."""
        op = self.get_op(names, length, base)
        statuses = self.run(op)
        self.check_content(names, op, statuses)
        return statuses

    def check_content(self, names: Sequence[int | str], op: Op, statuses: Sequence[Status]) -> None:
        for name, span, status in zip(names, op.spans, statuses, strict=True):
            if status is OK:
                got = bytes(self.view[span.offset : span.offset + span.length])
                assert got == bytes_of(name, span.length), f"wrong page served for {name}"

    def probe(self, names: Sequence[int | str]) -> tuple[Status, ...]:
        return self.run(Op(verb=Verb.PROBE, keys=tuple(map(key_of, names))))

    def drop(self, names: Sequence[int | str]) -> tuple[Status, ...]:
        return self.run(Op(verb=Verb.DROP, keys=tuple(map(key_of, names))))


def make_rig(
    backend: Backend,
    *,
    clock: MonotonicClock | VirtualClock | None = None,
    num_threads: int = 2,
    policy: GuardPolicy | None = None,
) -> Rig:
    clock = clock or MonotonicClock()
    return Rig(guarded(backend, clock, num_threads=num_threads, policy=policy), clock)


def faulty_rig(
    inner: Backend, *, seed: int = 0, clock: VirtualClock | None = None, num_threads: int = 2
) -> tuple[Rig, FaultyBackend]:
    """A guarded faulty twin that never stops asking (the breaker has its own tests)."""
    faulty = FaultyBackend(inner, seed=seed)
    policy = GuardPolicy(failures_to_open=1 << 30, bad_key_s=0.0)
    return make_rig(faulty, clock=clock, num_threads=num_threads, policy=policy), faulty


def item_of(name: int | str, length: int) -> Item:
    """For tests that drive a backend directly."""
    return Item(key_of(name), (memoryview(bytearray(bytes_of(name, length))),))
