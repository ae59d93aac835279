"""The tier controller: the only one who submits transfers. One thread, no waiting.

    scheduler -- loadable_pages, make_room, start_load, used --> controller --> transfers
    loop      -- poll, once a pass ---------------------------------->  |   <-- results

A pass polls first (commits and aborts what has ended), then starts what is queued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from phloem.cache import Ages, Match, PrefixCache, Reservation, WindowMatch
from phloem.cache.node import Node
from phloem.core.clock import Clock
from phloem.core.refs import PageRefs
from phloem.core.stats import TierStats, TransferStats
from phloem.core.store import Gone
from phloem.core.transfer import TransferKind, Transfers
from phloem.kv.keys import KeyFacts
from phloem.tiers.backups import HostBackups
from phloem.tiers.chooser import LoadChooser
from phloem.tiers.config import TierConfig
from phloem.tiers.cost import CostModel
from phloem.tiers.decisions import Decisions, StorageWay
from phloem.tiers.flights import Flights, Holds
from phloem.tiers.keys import Links
from phloem.tiers.loads import LoadEnd, Loads
from phloem.tiers.prefetch import Prefetches
from phloem.tiers.reuse import Reuse
from phloem.tiers.windows import RestorableLengths, WindowTiers
from phloem.tiers.writes import StorageWrites

__all__ = ["LoadEnd", "StorageKeys", "TierController"]

FLUSH_WAIT_S = 0.01
LEAST_PREFILL = 16
MAX_WRITES_QUEUED = 4  # paths; with more a small host takes no new pages for storage


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageKeys:
    """What goes into storage keys, whether there is a storage at this moment, what it has lost."""

    facts: KeyFacts
    attached: Callable[[], bool]
    take_gone: Callable[[], Gone] = Gone


class TierController:
    """Decides what moves between device, host and storage, and follows it."""

    def __init__(
        self,
        cache: PrefixCache,
        transfers: Transfers,
        clock: Clock,
        config: TierConfig,
        storage: StorageKeys | None = None,
    ) -> None:
        self.config = config
        self.cost = CostModel(
            page_bytes=config.page_bytes,
            window_page_bytes=config.window_page_bytes,
            page_size=cache.page_size,
        )
        self._chooser = LoadChooser(self.cost, cache.page_size)
        self._cache = cache
        self._clock = clock
        self._page_size = cache.page_size
        window_host = cache.leader.window_host
        hosts: tuple[Holds, ...] = (cache.leader.host,)
        self._flights = Flights(
            transfers, hosts if window_host is None else (*hosts, window_host), self.cost
        )
        self._windows = None  # of models with windows
        if window_host is not None:
            self._windows = WindowTiers(cache, window_host, self._flights)
        self._reuse = reuse = Reuse(config.selective_threshold)
        self._backups = HostBackups(
            cache,
            self._flights,
            config,
            reuse,
            on_backed_up=self._on_backed_up,
            is_congested=self._is_congested,
            is_stored=self._is_stored,
        )
        self._ages = Ages()
        cache.leader.ages = cache.leader.host.ages = self._ages
        self._loads = Loads(cache, self._flights)
        self._writes: StorageWrites | None = None
        self._prefetches: Prefetches | None = None
        self._storage = storage
        self._has_storage = False
        if storage is not None:
            self.change_identity(storage.facts)

    # For the scheduler.

    def loadable_pages(self, request_id: str, match: Match, num_tokens: int) -> int:
        """How many of the match's host pages to load for a request of `num_tokens` in all.

        With windows, how many pages beyond the match's device pages a load is to reach: 0 where a
        shorter match, or a restart lower down, is expected to be sooner.
        """
        return self._chooser.choose(request_id, match, num_tokens, self._storage_way(request_id))

    def gives_up_loading(self, request_id: str, match: Match, num_tokens: int) -> None:
        """A load for this request has failed: it computes all that is not on the device."""
        self._chooser.give_up(request_id, match, num_tokens, self._storage_way(request_id))

    @property
    def decisions(self) -> Decisions:
        """Why the newest requests' pages came from where they came."""
        return self._chooser.decisions

    def _storage_way(self, request_id: str) -> StorageWay | None:
        return None if self._prefetches is None else self._prefetches.look(request_id)

    def restorable_lengths(self, match: Match, request_id: str = "") -> RestorableLengths:
        """After how many pages of a prompt one could go on, tier by tier; of storage, what a queued
        request has learnt of it."""
        stored: tuple[int, ...] = ()
        if self._prefetches is not None:
            stored = self._prefetches.restorable_lengths(request_id)
        if isinstance(match, WindowMatch):
            device, host = match.valid_lengths, match.loadable_lengths
            return RestorableLengths(device=tuple(device), host=tuple(host), storage=stored)
        everything = tuple(range(match.num_pages + match.host_pages + 1))
        return RestorableLengths(
            device=everything[: match.num_pages + 1], host=everything, storage=stored
        )

    def queued(self, request_id: str, match: Match) -> None:
        """A request waits: what storage has of it is brought to the host meanwhile."""
        if self._prefetches is not None:
            self._prefetches.begin(request_id, match)

    def may_start(self, request_id: str) -> bool:
        """False: its pages are on their way from storage, and worth the wait."""
        return self._prefetches is None or self._prefetches.may_start(request_id)

    def leaves_queue(self, request_id: str) -> tuple[int, int]:
        """The request starts, or has gone; returns (first, count) of its pages from storage."""
        return (0, 0) if self._prefetches is None else self._prefetches.end(request_id)

    def make_room(self, num_pages: int, match: Match) -> bool:
        """See `HostBackups.make_room`."""
        return self._backups.make_room(num_pages, match)

    def start_load(self, reservation: Reservation, *, after_step: int) -> int:
        """Fill the reservation's loading pages from the host, once `after_step` has finished."""
        if self._windows is not None and reservation.window is not None:
            self._windows.touch(reservation.window.loads[1])
        return self._loads.start(reservation, after_step=after_step)

    def transfers_of(self, load_id: int) -> tuple[int, ...]:
        """What a step that reads a load's pages waits for; nothing when it has ended."""
        return self._loads.transfers_of(load_id)

    def take_destinations(self, component: int = 0) -> PageRefs:
        """Pages that loads were started into since the last call (if freed pages are recorded)."""
        return self._loads.take_destinations(component)

    def cancel_load(self, load_id: int) -> None:
        """Nobody will read what it loads."""
        self._loads.cancel(load_id)

    def used(self, node: Node, *, ended: bool) -> None:
        """A request has computed its prompt, or has `ended`: `node` is the end of its path."""
        if node is not self._cache.leader.tree.root and not node.detached:
            self._backups.used(node, ended=ended)
            if self._windows is not None and self._is_worth_a_copy(node, ended=ended):
                self._windows.used(node)
            if ended and self._writes is not None and self._has_storage:
                self._writes.used(node)

    def _is_worth_a_copy(self, node: Node, *, ended: bool) -> bool:
        """Whether the tail at the end of `node` is; a tail goes with the page that it ends with."""
        if self.config.write_policy != "write_through_selective":
            return True
        return ended and self._reuse.is_hot(node)

    @property
    def frees_pages(self) -> bool:
        """Device pages are locked by transfers that will end soon."""
        count = self._flights.count
        return count[TransferKind.LOAD_BACK] + count[TransferKind.BACKUP_HOST] > 0

    # For the loop.

    @property
    def busy(self) -> bool:
        """Transfers are in flight or wait to start."""
        queued = self._backups.num_queued
        if self._writes is not None:
            queued += self._writes.num_queued
        if self._windows is not None:
            queued += self._windows.num_queued
        return len(self._flights) > 0 or queued > 0

    def poll(self) -> list[LoadEnd]:
        """Take in what has ended, start what can start; returns the loads that have ended."""
        self._ages.note(self._cache.state.now, self._clock.now_s())
        self._look_at_storage()
        self._flights.poll()
        self._look_at_losses()
        self._backups.pump()
        if self._writes is not None:
            self._writes.pump()
        if self._windows is not None:
            self._windows.pump()
        return self._loads.take_ended()

    def step_finished(self, step: int) -> None:
        """All steps up to `step` have finished."""
        self._flights.step_finished(step)

    def wait(self, timeout_s: float) -> None:
        """Sleep until some transfer has ended, at most `timeout_s`."""
        self._flights.wait(timeout_s)

    def observe_step(self, num_tokens: int, longest_row: int, seconds: float) -> None:
        """A step of `num_tokens` tokens, `longest_row` of them in one row, took `seconds`."""
        if longest_row >= LEAST_PREFILL:  # decodes say nothing of the price of a prompt's token
            self.cost.observe_prefill(num_tokens, seconds)

    def stats(self) -> TierStats:
        """A snapshot of all counters."""
        flights = self._flights
        return TierStats(
            write_policy=self.config.write_policy,
            prefetch_policy=self.config.prefetch_policy,
            transfers=tuple(
                TransferStats(
                    kind=kind.value,
                    in_flight=flights.count[kind],
                    pages_total=flights.pages[kind],
                    bytes_total=flights.num_bytes[kind],
                    seconds_total=flights.seconds[kind],
                    failed_pages_total=flights.failed_pages[kind],
                    bandwidth=self.cost.bandwidth(kind),
                    window_pages_total=flights.window_pages[kind],
                    window_bytes_total=flights.window_bytes[kind],
                )
                for kind in TransferKind
                if kind is not TransferKind.PROBE
            ),
            queued_backups=self._backups.num_queued
            + (0 if self._windows is None else self._windows.num_queued_backups),
            held_host_pages=flights.num_held_slots,
            dropped_pages_total=tuple(sorted(self._dropped().items())),
            load_choices_total=tuple(self.cost.chosen.items()),
            load_failures_total=self._loads.num_failed,
            late_pages_total=0 if self._prefetches is None else self._prefetches.num_late_pages,
            ages=self._ages.stats(),
            prefill_rate=self.cost.prefill_rate,
            has_storage=self._has_storage,
        )

    def _dropped(self) -> Counter[str]:
        out = self._backups.dropped.copy()
        out.update({} if self._writes is None else self._writes.dropped)
        out.update({} if self._windows is None else self._windows.dropped)
        return out

    def change_identity(self, facts: KeyFacts) -> None:
        """From now on pages are stored and sought under the keys of these facts.

        The cache must have been flushed. Pages on their way from storage are thrown away.
        """
        if self._storage is None:
            return
        if self._prefetches is not None:
            self._prefetches.abandon()
        links = Links(facts, self._page_size)
        tails = None
        if self._windows is not None:
            self._windows.use_keys(links, self._storage_deadline_s)
            tails = self._windows.tail_reads(self.cost, self.config)
        self._writes = StorageWrites(
            self._cache,
            self._flights,
            links,
            copy_first=self._backups.copy,
            deadline_s=self._storage_deadline_s,
        )
        self._prefetches = Prefetches(
            self._cache,
            self._flights,
            links,
            self.config,
            clock=self._clock,
            cost=self.cost,
            attached=self._storage.attached,
            tails=tails,
        )

    def _storage_deadline_s(self) -> float:
        return self._clock.now_s() + self.config.storage_deadline_s

    def _look_at_storage(self) -> None:
        """A store may have been attached or detached: then nothing is known to be in it."""
        attached = self._storage is not None and self._storage.attached()
        if attached == self._has_storage or self._writes is None:
            return
        self._has_storage = self._backups.to_storage = attached
        self._cache.leader.host.waits_for_storage = attached
        self._writes.forget()
        if self._windows is not None:
            self._windows.storage_changed(attached=attached)
        for node in self._cache.leader.host.not_stored() if attached else ():
            self._writes.wants(node)

    def _look_at_losses(self) -> None:
        """After the results of this poll: what they say is older."""
        if self._writes is not None and self._storage is not None:
            gone = self._storage.take_gone()
            if gone.keys or gone.overflowed:
                self._writes.lost(gone)
                if self._windows is not None:
                    self._windows.lost(gone)

    def flush(self, timeout_s: float) -> int:
        """Write down what the policy says, ancestors first; for an orderly shutdown.

        Returns the pages that were still to be written when the time was up.
        """
        self._look_at_storage()
        if not self._has_storage:
            return 0
        deadline_s = self._clock.now_s() + timeout_s
        todo = self._backups.without_copy()
        for node in self._cache.leader.host.not_stored():
            if self._writes is not None:
                self._writes.wants(node)
        while (todo or self.busy) and self._clock.now_s() < deadline_s:
            stored = self._writes is None or not self._writes.num_queued
            if todo and stored and not self._backups.num_queued:
                self._backups.copy(todo.pop(0))
            self.poll()
            if self.busy:
                self._flights.wait(FLUSH_WAIT_S)
        return sum(node.num_pages for node in todo) + self._flights.num_pages_in_flight

    def _is_stored(self, node: Node) -> bool:
        return self._writes is not None and self._has_storage and self._writes.has(node)

    def _is_congested(self) -> bool:
        return self._writes is not None and self._writes.num_queued > MAX_WRITES_QUEUED

    def _on_backed_up(self, node: Node, num_pages: int) -> None:  # noqa: ARG002
        """Pages have arrived on the host: write them on to storage."""
        if self._writes is not None and self._has_storage:
            self._writes.arrived(node)
