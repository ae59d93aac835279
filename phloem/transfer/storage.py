"""The storage side of transfers: pages of the host arena to and from a PageStore.

One page of a component is one object per head group; a page has arrived when all of them have.
Without a store everything is answered at once as not done: the tier is empty. With one, pages
without bytes are always there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phloem.core.clock import Clock
from phloem.core.store import Done, Gone, Op, PageStore, Status, StoreStats, Ticket, Verb
from phloem.core.transfer import Transfer, TransferKind, TransferResult
from phloem.kv.keys import scope_of
from phloem.pools import HostArena

__all__ = ["StorageMover"]

# A transfer without a deadline gets this one: nothing waits for a store for ever.
DEFAULT_DEADLINE_S = 30.0
CLOSE_S = 5.0

_VERBS = {
    TransferKind.BACKUP_STORAGE: Verb.PUT,
    TransferKind.PREFETCH: Verb.GET,
    TransferKind.PROBE: Verb.PROBE,
}


@dataclass(slots=True)
class _Sent:
    transfer: Transfer
    started_s: float


class _Attached:
    """A store and what is under way in it."""

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self.sent: dict[Ticket, _Sent] = {}
        self.held: dict[Ticket, int] = {}  # ticket -> transfer whose host slots are quarantined


class StorageMover:
    """Submit and poll, on one thread. Stores come and go with `attach` and `detach`."""

    def __init__(self, arenas: Sequence[HostArena], clock: Clock) -> None:
        self._arenas, self._clock = tuple(arenas), clock  # by component
        self._scopes = [
            tuple(
                scope_of(arena.layout.spec.component().name, group)
                for group in range(arena.layout.num_head_groups)
            )
            for arena in arenas
        ]
        self._current: _Attached | None = None
        self._retired: list[_Attached] = []  # detached, but holding host pages still
        self._results: list[TransferResult] = []
        self._released: list[int] = []
        self._gone = Gone()
        self._told = Gone()  # of these: no older than the results that `poll` has handed out

    @property
    def attached(self) -> bool:
        return self._current is not None

    @property
    def busy(self) -> bool:
        """Whether a later poll may bring something."""
        stores = self._stores()
        return bool(self._results) or any(each.sent or each.held for each in stores)

    @property
    def ready(self) -> bool:
        """Whether a poll now would bring something for certain."""
        return bool(self._results or self._released)

    def attach(self, store: PageStore) -> None:
        """Use `store` from now on; takes it over. There must be none."""
        assert self._current is None, "a store is attached already"
        store.attach([arena.arena() for arena in self._arenas if arena.num_bytes])
        self._current = _Attached(store)
        self._gone = self._told = Gone()

    def detach(self, timeout_s: float = CLOSE_S) -> None:
        """Answer what is under way, and close the store; held pages stay quarantined."""
        current, self._current = self._current, None
        if current is None:
            return
        current.store.close(self._clock.now_s() + timeout_s)
        self._retired.append(current)
        self._collect()

    def submit(self, transfer: Transfer) -> None:
        if self._current is None or transfer.num_pages == 0:
            self._results.append(_nothing_done(transfer, "no storage is attached"))
            return
        if self._arenas[transfer.component].num_bytes == 0:
            self._results.append(_all_done(transfer))
            return
        deadline_s = min(transfer.deadline_s, self._clock.now_s() + DEFAULT_DEADLINE_S)
        ticket = self._current.store.submit(self._op(transfer), deadline_s)
        self._current.sent[ticket] = _Sent(transfer, time.perf_counter())

    def poll(self) -> list[TransferResult]:
        self._collect()
        results, self._results = self._results, []
        self._told, self._gone = _both(self._told, self._gone), Gone()
        return results

    def take_gone(self) -> Gone:
        """What the store has lost, told once; to be taken in after the results of `poll`."""
        gone, self._told = self._told, Gone()
        return gone

    def released(self) -> list[int]:
        self._collect()
        released, self._released = self._released, []
        return released

    def wait(self, timeout_s: float) -> None:
        """Sleep until a poll would bring something, at most so long."""
        waiting = [each for each in self._stores() if each.sent or each.held]
        if waiting and not self.ready:
            waiting[0].store.wait(timeout_s / len(waiting))
            self._collect()

    def cancel(self, transfer_id: int) -> None:
        for each in self._stores():
            for ticket, sent in each.sent.items():
                if sent.transfer.id == transfer_id:
                    each.store.cancel(ticket)

    def stats(self) -> StoreStats | None:
        """Figures of the attached store."""
        return None if self._current is None else self._current.store.stats()

    def close(self) -> None:
        self.detach()

    def _stores(self) -> list[_Attached]:
        return self._retired if self._current is None else [*self._retired, self._current]

    def _op(self, transfer: Transfer) -> Op:
        arena, scopes = self._arenas[transfer.component], self._scopes[transfer.component]
        keys = tuple(link + scope for link in transfer.links for scope in scopes)
        verb = _VERBS[transfer.kind]
        if verb is Verb.PROBE:
            return Op(verb=verb, keys=keys)
        groups = range(len(scopes))
        spans = tuple(
            arena.span(slot, group) for slot in transfer.host.tolist() for group in groups
        )
        return Op(verb=verb, keys=keys, spans=spans)

    def _collect(self) -> None:
        for each in self._stores():
            polled = each.store.poll()
            for done in polled.done:
                self._take(each, done)
            for ticket in polled.released:
                transfer_id = each.held.pop(ticket, None)
                if transfer_id is not None:
                    self._released.append(transfer_id)
            if each is self._current:
                self._gone = _both(self._gone, polled.gone)
        self._retired = [each for each in self._retired if each.sent or each.held]

    def _take(self, each: _Attached, done: Done) -> None:
        sent = each.sent.pop(done.ticket, None)
        if sent is None:
            return
        transfer = sent.transfer
        layout = self._arenas[transfer.component].layout
        groups = layout.num_head_groups
        good = np.array([status is Status.OK for status in done.statuses], dtype=np.bool_)
        whole: npt.NDArray[np.bool_] = np.logical_and.reduce(good.reshape(-1, groups), axis=1)
        held = None
        if done.held:
            each.held[done.ticket] = transfer.id
            held = np.zeros(transfer.num_pages, dtype=np.bool_)
            held[np.array(done.held) // groups] = True
        moved = 0 if done.verb is Verb.PROBE else int(good.sum()) * layout.object_bytes
        self._results.append(
            TransferResult(
                id=transfer.id,
                done=whole,
                held=held,
                num_bytes=moved,
                seconds=time.perf_counter() - sent.started_s,
                error=_reason(done),
            )
        )


def _both(first: Gone, then: Gone) -> Gone:
    if not then.keys and not then.overflowed:
        return first
    return Gone(first.keys + then.keys, first.overflowed or then.overflowed)


def _nothing_done(transfer: Transfer, why: str) -> TransferResult:
    return TransferResult(
        id=transfer.id, done=np.zeros(transfer.num_pages, dtype=np.bool_), error=why
    )


def _all_done(transfer: Transfer) -> TransferResult:
    return TransferResult(id=transfer.id, done=np.ones(transfer.num_pages, dtype=np.bool_))


def _reason(done: Done) -> str | None:
    """The first thing that went wrong; a miss is nothing wrong."""
    for status in done.statuses:
        if status not in (Status.OK, Status.MISS):
            return str(status.value)
    return None
