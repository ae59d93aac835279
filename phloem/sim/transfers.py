"""Transfers in the simulator: a virtual clock, costs by the page, seeded delays and failures.

Pages have contents where the worker's have (`FakeWorker.memory`); host pages and storage remember
what was copied into them, so a page that was freed, reused or copied too early shows. A transfer
reads and writes at a moment that is drawn between its start and its end: no order may be relied on.
A second component has a memory, a host and names in storage of its own. The device pages of several
owners are one memory (owners, pages, page_size); the host is shared by all.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phloem.core.clock import VirtualClock
from phloem.core.refs import owner_of, slot_of
from phloem.core.store import Gone
from phloem.core.transfer import Transfer, TransferKind, TransferResult

__all__ = ["SimStorage", "SimTransfers", "TransferCosts"]

Memory = npt.NDArray[np.int64]
_POISON = -2
EAGER = 0.3  # of the transfers have moved their pages as soon as they may start
_HOST_READS = (TransferKind.LOAD_BACK, TransferKind.BACKUP_STORAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCosts:
    """Seconds of a transfer, by tier; `jitter` times that at most comes on top, drawn."""

    fixed_s: float = 1e-4
    host_page_s: float = 2e-5
    storage_page_s: float = 4e-4
    jitter: float = 0.0

    def seconds(self, transfer: Transfer, weight: float = 1.0) -> float:
        """`weight`: bytes of one of its pages, against those of the larger component's."""
        per_page = {
            TransferKind.BACKUP_HOST: self.host_page_s,
            TransferKind.LOAD_BACK: self.host_page_s,
            TransferKind.PROBE: 0.0,
        }.get(transfer.kind, self.storage_page_s)
        return self.fixed_s + per_page * transfer.num_pages * weight


class SimStorage:
    """What storage holds, by link (of windows: link and `WINDOW`); outlives the engines that write
    to it."""

    WINDOW = b"/window"

    def __init__(self) -> None:
        self.pages: dict[bytes, Memory | None] = {}
        self.puts = 0
        self._gone: list[bytes] = []
        self._overflowed = False

    def lose(self, links: Iterable[bytes]) -> None:
        """Forget pages, as a full store does, and say so at the next `take_gone`."""
        for link in links:
            self.pages.pop(link, None)
            self._gone.append(link)

    def overflow(self) -> None:
        """More has gone than `take_gone` can name."""
        self._overflowed = True

    def take_gone(self) -> Gone:
        """What was lost since the last call and has not come back."""
        gone = tuple(link for link in self._gone if link not in self.pages)
        overflowed, self._overflowed = self._overflowed, False
        self._gone.clear()
        return Gone(gone, overflowed)


@dataclass(slots=True)
class _Flight:
    transfer: Transfer
    seconds: float
    move_at: float  # a part of `seconds`, after the start
    due_s: float | None = None  # None: waits for a step
    moved: bool = False
    fails: bool = False
    cancelled: bool = False
    waited_for: bool = False  # by a step: no barrier holds it any longer
    done: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))


def _never(transfer: Transfer) -> bool:  # noqa: ARG001 - the signature is the contract
    return False


class SimTransfers:
    """Implements `core.transfer.Transfers` and, for `FakeWorker`, `LayerGate`.

    `fails(transfer)` makes a transfer end without its pages; `blocked(transfer)` is a barrier: as
    long as it answers True the transfer does not end. `memory` None: pages have no contents. A
    window component is added by `add_window`.
    """

    def __init__(
        self,
        clock: VirtualClock,
        *,
        num_host_pages: int,
        memory: Memory | None = None,
        storage: SimStorage | None = None,
        costs: TransferCosts | None = None,
        seed: int = 0,
        fails: Callable[[Transfer], bool] = _never,
        blocked: Callable[[Transfer], bool] = _never,
    ) -> None:
        self.log: list[Transfer] = []
        self.failed: set[int] = set()
        self.storage = storage
        self._memories = [memory]  # by component
        self.hosts = [_host_of(memory, num_host_pages)]
        self._page_bytes: tuple[int, ...] = (1,)
        self.num_bytes: Counter[tuple[TransferKind, int]] = Counter()  # moved, by component
        self._clock = clock
        self._costs = TransferCosts() if costs is None else costs
        self._rng = random.Random(seed)
        self._fails = fails
        self._blocked = blocked
        self._flights: dict[int, _Flight] = {}
        self._free_at = dict.fromkeys(TransferKind, 0.0)  # each way is one channel
        self._finished_step = -1

    def add_window(
        self,
        *,
        num_host_pages: int,
        memory: Memory | None = None,
        page_bytes: tuple[int, int] = (1, 1),
    ) -> None:
        """Move pages of a second component too; `page_bytes` are those of both."""
        self._memories.append(memory)
        self.hosts.append(_host_of(memory, num_host_pages))
        self._page_bytes = page_bytes

    def submit(self, transfer: Transfer) -> None:
        self.log.append(transfer)
        weight = self._page_bytes[transfer.component] / max(1, *self._page_bytes)
        seconds = self._costs.seconds(transfer, weight)
        seconds *= 1 + self._costs.jitter * self._rng.random()
        flight = _Flight(transfer, seconds, self._rng.random() * seconds)
        flight.done = np.zeros(transfer.num_pages, dtype=np.bool_)
        flight.fails = self._fails(transfer)
        self._flights[transfer.id] = flight
        self._start_ready()

    def poll(self) -> list[TransferResult]:
        self._advance()
        ended = [f for f in self._flights.values() if self._has_ended(f)]
        return [self._end(flight) for flight in ended]

    def released(self) -> list[int]:
        return []

    def wait(self, timeout_s: float) -> None:
        """Move the clock on to the next end, or by the timeout."""
        due = [f.due_s for f in self._flights.values() if f.due_s is not None]
        now = self._clock.now_s()
        step = min((at - now for at in due if at > now), default=timeout_s)
        self._clock.advance(min(step, timeout_s) if due else timeout_s)

    def cancel(self, transfer_id: int) -> None:
        self._flights[transfer_id].cancelled = True

    def step_finished(self, step: int) -> None:
        self._finished_step = max(self._finished_step, step)
        self._start_ready()

    def wait_layer(self, transfer_ids: tuple[int, ...], layer: int) -> None:  # noqa: ARG002
        """Move the clock on until these loads have ended."""
        for transfer_id in transfer_ids:
            flight = self._flights.get(transfer_id)
            if flight is None:
                continue
            assert flight.due_s is not None, "a step waits for a load that waits for that step"
            flight.waited_for = True
            self._clock.advance(max(0.0, flight.due_s - self._clock.now_s()))
            self._move(flight)

    def close(self) -> None:
        self._flights.clear()

    def _start_ready(self) -> None:
        for flight in self._flights.values():
            kind = flight.transfer.kind
            if flight.due_s is None and flight.transfer.after_step <= self._finished_step:
                start = max(self._clock.now_s(), self._free_at[kind])
                flight.due_s = start + flight.seconds
                flight.move_at += start
                self._free_at[kind] = flight.due_s
                if self._rng.random() < EAGER:
                    self._move(flight)

    def _advance(self) -> None:
        now = self._clock.now_s()
        for flight in self._flights.values():
            if flight.due_s is not None and flight.move_at <= now:
                self._move(flight)

    def _has_ended(self, flight: _Flight) -> bool:
        if self._is_blocked(flight):
            return False
        if flight.cancelled:
            return True
        return flight.due_s is not None and flight.due_s <= self._clock.now_s()

    def _is_blocked(self, flight: _Flight) -> bool:
        return not flight.waited_for and self._blocked(flight.transfer)

    def _end(self, flight: _Flight) -> TransferResult:
        if not flight.cancelled:
            self._move(flight)
        transfer = flight.transfer
        del self._flights[transfer.id]
        num_bytes = int(flight.done.sum()) * self._page_bytes[transfer.component]
        if transfer.kind is TransferKind.PROBE:
            num_bytes = 0
        self.num_bytes[transfer.kind, transfer.component] += num_bytes
        return TransferResult(
            id=transfer.id,
            done=flight.done,
            num_bytes=num_bytes,
            seconds=flight.seconds,
            error="made to fail" if flight.fails else None,
        )

    def _move(self, flight: _Flight) -> None:
        if flight.moved or self._is_blocked(flight):
            return
        flight.moved = True
        transfer = flight.transfer
        for index in range(transfer.num_pages):
            # A failure leaves some pages whole and some half written.
            if flight.fails and self._rng.random() < 0.5:
                self._spoil(transfer, index)
                continue
            flight.done[index] = self._copy(transfer, index)
        if flight.fails:
            flight.done[-1] = False
            self.failed.add(transfer.id)

    def _copy(self, transfer: Transfer, index: int) -> bool:
        """Move one page; whether there was one."""
        kind = transfer.kind
        memory, host = self._memories[transfer.component], self.hosts[transfer.component]
        if kind in (TransferKind.BACKUP_HOST, TransferKind.LOAD_BACK):
            if memory is not None and host is not None:
                device, slot = _page(memory, transfer, index), transfer.host[index]
                if kind is TransferKind.BACKUP_HOST:
                    host[slot] = device
                else:
                    device[:] = host[slot]
            return True
        if self.storage is None:
            return False
        link = transfer.links[index] + SimStorage.WINDOW * transfer.component
        if kind is TransferKind.BACKUP_STORAGE:
            page = None if host is None else host[transfer.host[index]].copy()
            self.storage.pages[link] = page
            self.storage.puts += 1
            return True
        if link not in self.storage.pages:
            return False
        stored = self.storage.pages[link]
        if kind is TransferKind.PREFETCH and host is not None and stored is not None:
            host[transfer.host[index]] = stored
        return True

    def _spoil(self, transfer: Transfer, index: int) -> None:
        memory, host = self._memories[transfer.component], self.hosts[transfer.component]
        if transfer.kind is TransferKind.LOAD_BACK and memory is not None:
            _page(memory, transfer, index)[:] = _POISON
        elif transfer.kind not in _HOST_READS and host is not None and len(transfer.host):
            host[transfer.host[index]] = _POISON


def _page(memory: Memory, transfer: Transfer, index: int) -> Memory:
    """A view of one device page."""
    ref = int(transfer.device[index])
    page: Memory = memory[owner_of(ref), slot_of(ref)]
    return page


def _host_of(memory: Memory | None, num_pages: int) -> Memory | None:
    """Host pages of a component whose device pages have contents."""
    return None if memory is None else np.full((num_pages, memory.shape[-1]), _POISON, np.int64)
