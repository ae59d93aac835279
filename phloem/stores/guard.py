"""What stands between the tier controller and any store: circuit breaker and negative cache.

A dead or hung backend costs the requests in flight their deadline, a few times; then nothing is
asked of it any more, every call is answered DOWN at once, and a probe of the guard's own finds out
when it is back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phloem.core.clock import Clock
from phloem.core.store import (
    KEY_BYTES,
    Arena,
    Caps,
    Done,
    Op,
    PageStore,
    Polled,
    Status,
    StoreStats,
    Ticket,
    Verb,
)
from phloem.stores.breaker import Breaker
from phloem.stores.negative import NegativeCache

__all__ = ["GuardPolicy", "GuardedStore"]

_PROBE = Op(verb=Verb.PROBE, keys=(bytes(KEY_BYTES),))


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardPolicy:
    """How patient the guard is."""

    failures_to_open: int = 4  # tickets in a row that failed
    pause_s: float = 0.5
    longest_pause_s: float = 30.0
    probe_deadline_s: float = 1.0
    bad_key_s: float = 5.0  # a key whose read failed is not asked for again so long
    miss_s: float = 0.0  # a key that was missing likewise; 0 where asking is free (local stores)


@dataclass(slots=True)
class _Sent:
    """A ticket of ours under way: which of its keys the store below was asked for."""

    ticket: Ticket
    op: Op
    positions: Sequence[int]


class GuardedStore:
    """A PageStore over a PageStore."""

    def __init__(self, inner: PageStore, clock: Clock, policy: GuardPolicy | None = None) -> None:
        self._inner = inner
        self._clock = clock
        self._policy = policy or GuardPolicy()
        self._breaker = Breaker(
            threshold=self._policy.failures_to_open,
            pause_s=self._policy.pause_s,
            longest_pause_s=self._policy.longest_pause_s,
        )
        self._negative = NegativeCache()
        self._next_ticket = 1
        self._sent: dict[Ticket, _Sent] = {}  # by the inner ticket
        self._inner_of: dict[Ticket, Ticket] = {}
        self._holding: dict[Ticket, Ticket] = {}  # inner ticket -> ours, until released
        self._answered: list[Done] = []  # without asking
        self._probe: Ticket | None = None
        self._num_refused = 0
        self._num_spared = 0

    @property
    def caps(self) -> Caps:
        return self._inner.caps

    def attach(self, arenas: Sequence[Arena]) -> None:
        self._inner.attach(arenas)

    def submit(self, op: Op, deadline_s: float) -> Ticket:
        self._probe_if_due()
        ticket = self._next_ticket
        self._next_ticket += 1
        if not self._breaker.allows:
            self._num_refused += len(op.keys)
            self._answer(ticket, op, Status.DOWN)
            return ticket
        positions = self._worth_asking(op)
        if not positions:
            self._answer(ticket, op, Status.MISS)
            return ticket
        asked = op if len(positions) == len(op.keys) else _part_of(op, positions)
        inner = self._inner.submit(asked, deadline_s)
        self._sent[inner] = _Sent(ticket, op, positions)
        self._inner_of[ticket] = inner
        return ticket

    def _answer(self, ticket: Ticket, op: Op, status: Status) -> None:
        statuses = (status,) * len(op.keys)
        self._answered.append(Done(ticket=ticket, verb=op.verb, statuses=statuses))

    def _worth_asking(self, op: Op) -> Sequence[int]:
        everything = range(len(op.keys))
        if op.verb not in (Verb.GET, Verb.PROBE) or not len(self._negative):
            return everything
        now = self._clock.now_s()
        positions = [i for i in everything if not self._negative.has(op.keys[i], now)]
        self._num_spared += len(op.keys) - len(positions)
        return positions

    def cancel(self, ticket: Ticket) -> None:
        inner = self._inner_of.get(ticket)
        if inner is not None:
            self._inner.cancel(inner)

    def poll(self) -> Polled:
        self._probe_if_due()
        polled = self._inner.poll()
        done = self._answered
        self._answered = []
        for answer in polled.done:
            if answer.ticket == self._probe:
                self._probed(answer)
            elif answer.ticket in self._sent:
                done.append(self._translate(answer))
        released = [self._holding.pop(t) for t in polled.released if t in self._holding]
        return Polled(tuple(done), tuple(released), polled.gone)

    def _translate(self, answer: Done) -> Done:
        sent = self._sent.pop(answer.ticket)
        del self._inner_of[sent.ticket]
        statuses = [Status.MISS] * len(sent.op.keys)
        for position, status in zip(sent.positions, answer.statuses, strict=True):
            statuses[position] = status
        self._learn(sent.op, statuses, sent.positions)
        if answer.held:
            self._holding[answer.ticket] = sent.ticket
        held = tuple(sent.positions[index] for index in answer.held)
        return replace(answer, ticket=sent.ticket, statuses=tuple(statuses), held=held)

    def _learn(self, op: Op, statuses: Sequence[Status], positions: Sequence[int]) -> None:
        """Feed breaker and negative cache with what the store below has answered."""
        now = self._clock.now_s()
        for position in positions:
            key, status = op.keys[position], statuses[position]
            if op.verb is Verb.PUT and status is Status.OK:
                self._negative.discard(key)
            elif op.verb is Verb.GET and status.is_failure:
                self._negative.add(key, now + self._policy.bad_key_s)
            elif op.verb is not Verb.PUT and status is Status.MISS and self._policy.miss_s:
                self._negative.add(key, now + self._policy.miss_s)
        answered = {statuses[position] for position in positions}
        if answered & {Status.ERROR, Status.TIMEOUT}:
            self._breaker.failed(now)
        elif answered & {Status.OK, Status.MISS}:
            self._breaker.succeeded()

    def _probe_if_due(self) -> None:
        now = self._clock.now_s()
        if self._breaker.wants_probe(now):
            self._probe = self._inner.submit(_PROBE, now + self._policy.probe_deadline_s)

    def _probed(self, answer: Done) -> None:
        self._probe = None
        alive = answer.statuses[0] in (Status.OK, Status.MISS)
        self._breaker.probed(alive, self._clock.now_s())

    def wait(self, timeout_s: float) -> None:
        if not self._answered:
            self._inner.wait(timeout_s)

    def stats(self) -> StoreStats:
        stats = self._inner.stats()
        details = (
            ("breaker_opened", self._breaker.num_opened),
            ("keys_refused_while_down", self._num_refused),
            ("keys_spared_by_negative_cache", self._num_spared),
        )
        return replace(
            stats,
            details_total=stats.details_total + details,
            healthy=stats.healthy and self._breaker.allows,
        )

    def close(self, deadline_s: float) -> None:
        self._inner.close(deadline_s)


def _part_of(op: Op, positions: Sequence[int]) -> Op:
    return Op(
        verb=op.verb,
        keys=tuple(op.keys[i] for i in positions),
        spans=tuple(op.spans[i] for i in positions) if op.spans else (),
    )
