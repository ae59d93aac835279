"""Host to device: what a request waits for, one load of one transfer per component.

A load is named by its first transfer. It is over when all of them are, and good if all pages of all
of them have arrived: full pages without the tail that they end with are of no use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phloem.cache import PrefixCache, Reservation
from phloem.core.refs import NO_REFS, PageRefs
from phloem.core.transfer import TransferKind, TransferResult
from phloem.tiers.flights import Flights

__all__ = ["LoadEnd", "Loads"]


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """A load has ended; `ok`: all its pages are on the device."""

    id: int
    ok: bool


class Loads:
    """Follows LOAD_BACK transfers."""

    def __init__(self, cache: PrefixCache, flights: Flights) -> None:
        self._leader = cache.leader
        self._flights = flights
        self._under_way: dict[int, tuple[int, ...]] = {}  # transfers by load
        self._destinations: tuple[list[PageRefs], list[PageRefs]] = ([], [])  # by component
        self._ended: list[LoadEnd] = []
        self.num_failed = 0

    def start(self, reservation: Reservation, *, after_step: int) -> int:
        """Fill the reservation's loading pages, once `after_step` has finished; the load's name."""
        first, count = reservation.num_cached_pages, reservation.num_loading_pages
        parts = [(0, reservation.refs[first : first + count], reservation.load_slots)]
        if reservation.window is not None:
            window_refs, window_slots = reservation.window.loads
            parts.append((1, np.frombuffer(window_refs, np.int64), window_slots))
        parts = [part for part in parts if len(part[1])]
        results: list[bool] = []

        def on_end(result: TransferResult) -> None:
            results.append(bool(result.done.all()))
            if len(results) == len(parts):
                reservation.end_load()
                self._end(load_id, ok=all(results))

        transfers = []
        for component, refs, slots in parts:
            if self._leader.record_freed:
                self._destinations[component].append(refs)
            transfer = self._flights.submit(
                TransferKind.LOAD_BACK,
                on_end,
                component=component,
                device=refs.tobytes(),
                host=slots,
                after_step=after_step,
            )
            transfers.append(transfer)
        load_id = transfers[0]
        self._under_way[load_id] = tuple(transfers)
        return load_id

    def transfers_of(self, load_id: int) -> tuple[int, ...]:
        """What a step that reads a load's pages waits for; nothing when it has ended."""
        return self._under_way.get(load_id, ())

    def cancel(self, load_id: int) -> None:
        """Nobody will read what it loads."""
        for transfer_id in self.transfers_of(load_id):
            self._flights.cancel(transfer_id)

    def take_destinations(self, component: int) -> PageRefs:
        """Pages that loads were started into since the last call (if freed pages are recorded)."""
        parts = self._destinations[component].copy()
        self._destinations[component].clear()
        return np.concatenate(parts) if parts else NO_REFS

    def take_ended(self) -> list[LoadEnd]:
        """Loads that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _end(self, load_id: int, *, ok: bool) -> None:
        self.num_failed += not ok
        del self._under_way[load_id]
        self._ended.append(LoadEnd(load_id, ok))
