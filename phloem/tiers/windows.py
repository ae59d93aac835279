"""The window side of the controller: what it decides for models some of whose layers have a window.

ways to begin a prompt      first token computed     loaded first
shorter valid match         its end                  nothing
restart lower down          below the full match     nothing
load to a loadable length   its end                  full pages beyond the device, its tail
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phloem.cache import PrefixCache, WindowMatch
from phloem.cache.components import ABSENT
from phloem.cache.node import Node
from phloem.cache.window_host import WindowHost
from phloem.core.store import Gone
from phloem.kv.keys import LINK_BYTES
from phloem.tiers.config import TierConfig
from phloem.tiers.cost import CostModel, Way
from phloem.tiers.flights import Flights
from phloem.tiers.keys import Links
from phloem.tiers.window_backups import WindowBackups
from phloem.tiers.window_path import WindowPath
from phloem.tiers.window_prefetch import TailReads
from phloem.tiers.window_writes import WindowWrites

__all__ = ["RestorableLengths", "WindowTiers", "ways_to_begin"]

MAX_WAYS = 64  # loadable lengths that are compared; the longest ones


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorableLengths:
    """After how many pages of a prompt one can go on, ascending: with the device alone, with the
    host as well, and with storage as far as it has been asked. Ranks can intersect these."""

    device: tuple[int, ...]
    host: tuple[int, ...]
    storage: tuple[int, ...] = ()


def ways_to_begin(match: WindowMatch) -> list[Way]:
    """Every way that is worth a look; the first one loads nothing."""
    size, tail = match.page_size, match.tail_pages
    ways = [Way(start=match.restart_start())]
    lengths = [each for each in match.loadable_lengths if each * size > ways[0].start]
    if not lengths:
        return ways
    here = np.zeros(lengths[-1], dtype=np.bool_)
    refs = match.window_refs()[: lengths[-1]]
    here[: len(refs)] = refs != ABSENT
    missing = np.concatenate([[0], np.cumsum(~here)])
    for length in lengths[-MAX_WAYS:]:
        window = int(missing[length] - missing[max(0, length - tail)])
        full = max(0, length - match.full_pages)
        ways.append(Way(start=length * size, full_pages=full, window_pages=window))
    return ways


class WindowTiers:
    """Host copies, storage objects and loads of the window component."""

    def __init__(self, cache: PrefixCache, host: WindowHost, flights: Flights) -> None:
        self._cache = cache
        self._flights = flights
        self.host = host
        self._writes: WindowWrites | None = None
        self._to_storage = False
        self._backups = WindowBackups(cache, host, flights, self._on_backed_up)

    def use_keys(self, links: Links, deadline_s: Callable[[], float]) -> None:
        """From now on window state is stored under these names."""
        self._writes = WindowWrites(self._cache, self.host, self._flights, links, deadline_s)

    def tail_reads(self, cost: CostModel, config: TierConfig) -> TailReads:
        """What brings tails from storage; after `use_keys`."""
        assert self._writes is not None, "there are no keys yet"
        return TailReads(self._cache, self.host, self._writes, cost, config)

    def storage_changed(self, *, attached: bool) -> None:
        """A store was attached or detached: nothing is known to be in it."""
        self._to_storage = attached
        if self._writes is not None:
            self._writes.forget()
            if attached:
                self._writes.wants_all()

    def used(self, node: Node) -> None:
        """The path down to `node` is in use, and its tail is worth a copy.

        What storage has lost of it is written again.
        """
        self._backups.used(node)
        if self._writes is not None and self._to_storage and self._writes.has_losses:
            path = WindowPath.down_to(node)
            for slot in path.slots[path.on_host][-1:].tolist():
                self._writes.wants(slot)

    def lost(self, gone: Gone) -> None:
        """Storage has lost objects, of one component or the other."""
        if self._writes is None:
            return
        if gone.overflowed:
            self._writes.all_may_be_lost()
        self._writes.are_lost(key[:LINK_BYTES] for key in gone.keys)

    def pump(self) -> None:
        """Start what can be started now."""
        self._backups.pump()
        if self._writes is not None:
            self._writes.pump()

    @property
    def num_queued_backups(self) -> int:
        return self._backups.num_queued

    @property
    def num_queued(self) -> int:
        return self._backups.num_queued + (0 if self._writes is None else self._writes.num_queued)

    @property
    def dropped(self) -> Counter[str]:
        """Pages that were not copied, by reason."""
        return self._backups.dropped + (Counter() if self._writes is None else self._writes.dropped)

    def touch(self, slots: bytes) -> None:
        """Host copies are loaded: they go last."""
        self.host.touch(array("q", slots))

    def _on_backed_up(self, slot: int) -> None:
        if self._writes is not None and self._to_storage:
            self._writes.wants(slot)
