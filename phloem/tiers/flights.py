"""Transfers in flight: ids, callbacks, measurements, and slots that outlive their transfer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np

from phloem.core.transfer import Transfer, TransferKind, TransferResult, Transfers
from phloem.tiers.cost import CostModel

__all__ = ["Flights", "Holds", "OnEnd"]

OnEnd: TypeAlias = Callable[[TransferResult], None]
_NO_SLOTS = np.empty(0, dtype=np.int64)


class Holds(Protocol):
    """Keeps host slots from being used again (see `replica.host_pool`)."""

    def hold(self, slots: bytes) -> None: ...

    def release(self, slots: bytes) -> None: ...


class Flights:
    """Submits transfers and hands each result to who asked for it, exactly once.

    Counters are of both components; `window_pages` and `window_bytes` are the window's part.
    """

    def __init__(self, transfers: Transfers, hosts: tuple[Holds, ...], cost: CostModel) -> None:
        self._transfers = transfers
        self._hosts = hosts  # by component
        self._cost = cost
        self._next_id = 0
        self._flying: dict[int, tuple[Transfer, OnEnd]] = {}
        self._held: dict[int, tuple[int, bytes]] = {}  # quarantined: component and slots
        self.num_ended = 0
        self.count: Counter[TransferKind] = Counter()  # in flight
        self.pages: Counter[TransferKind] = Counter()  # arrived, since the start
        self.num_bytes: Counter[TransferKind] = Counter()
        self.window_pages: Counter[TransferKind] = Counter()
        self.window_bytes: Counter[TransferKind] = Counter()
        self.seconds = dict.fromkeys(TransferKind, 0.0)
        self.failed_pages: Counter[TransferKind] = Counter()

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def num_pages_in_flight(self) -> int:
        return sum(transfer.num_pages for transfer, _ in self._flying.values())

    @property
    def num_held_slots(self) -> int:
        return sum(len(slots) // 8 for _, slots in self._held.values())

    def submit(
        self,
        kind: TransferKind,
        on_end: OnEnd,
        *,
        component: int = 0,
        device: bytes = b"",
        host: bytes = b"",
        links: tuple[bytes, ...] = (),
        after_step: int = -1,
        deadline_s: float = float("inf"),
    ) -> int:
        """Start a transfer of packed refs and slots; `on_end` hears of its result, from `poll`."""
        transfer = Transfer(
            id=self._next_id,
            kind=kind,
            component=component,
            device=np.frombuffer(device, np.int64) if device else _NO_SLOTS,
            host=np.frombuffer(host, np.int64) if host else _NO_SLOTS,
            links=links,
            after_step=after_step,
            deadline_s=deadline_s,
        )
        self._next_id += 1
        self._flying[transfer.id] = (transfer, on_end)
        self.count[kind] += 1
        self._transfers.submit(transfer)
        return transfer.id

    def cancel(self, transfer_id: int) -> None:
        """Start no more pages of it, if it still flies."""
        if transfer_id in self._flying:
            self._transfers.cancel(transfer_id)

    def poll(self) -> None:
        """Call back for everything that has ended; never waits."""
        for result in self._transfers.poll():
            self._end(result)
        for transfer_id in self._transfers.released():
            component, slots = self._held.pop(transfer_id)
            self._hosts[component].release(slots)

    def wait(self, timeout_s: float) -> None:
        """Sleep until something ends."""
        self._transfers.wait(timeout_s)

    def step_finished(self, step: int) -> None:
        self._transfers.step_finished(step)

    def _end(self, result: TransferResult) -> None:
        transfer, on_end = self._flying.pop(result.id)
        kind = transfer.kind
        self.count[kind] -= 1
        self.num_ended += 1
        arrived = int(np.count_nonzero(result.done))
        if kind is not TransferKind.PROBE:
            self.pages[kind] += arrived
            self.num_bytes[kind] += result.num_bytes
            self.seconds[kind] += result.seconds
            self.failed_pages[kind] += transfer.num_pages - arrived
            if transfer.component:
                self.window_pages[kind] += arrived
                self.window_bytes[kind] += result.num_bytes
            if arrived and arrived == transfer.num_pages:
                pages = self._cost.in_pages(transfer.component, arrived)
                self._cost.observe_transfer(kind, pages, result.seconds)
        if result.held is not None and result.held.any():
            slots = transfer.host[result.held].tobytes()
            self._hosts[transfer.component].hold(slots)
            self._held[result.id] = (transfer.component, slots)
        on_end(result)
