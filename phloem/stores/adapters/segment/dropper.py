"""Drops objects for good: out of the index, and noted so that no later scan finds them again."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from phloem.core.store import Status
from phloem.stores.adapters.segment.catalog import Catalog
from phloem.stores.adapters.segment.directory import DirectoryBusy, SegmentDirectory
from phloem.stores.adapters.segment.droplog import MAX_DROPS, Drop, DropLog, drop_of
from phloem.stores.adapters.segment.index import Index, Location

__all__ = ["Dropper", "Moves"]

PATIENCE_S = 1.0
MAX_KEPT = MAX_DROPS * 7 // 8  # beyond, living objects go with the dropped ones of their segment


class Moves:
    """Keeps drops and the carrying of objects from one life of a segment to the next apart.

    An object on its way is in no index: a drop would miss it, and it would be back afterwards.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._num_moving = 0

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Several may move at once."""
        with self._lock:
            self._num_moving += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_moving -= 1
                self._lock.notify_all()

    @contextlib.contextmanager
    def paused(self) -> Iterator[bool]:
        """Nothing moves meanwhile: True. Or it did not stop soon enough: False."""
        with self._lock:
            yield self._lock.wait_for(lambda: not self._num_moving, PATIENCE_S)


class Dropper:
    """For any number of threads."""

    def __init__(
        self,
        directory: SegmentDirectory,
        catalog: Catalog,
        index: Index,
        log: DropLog,
        moves: Moves,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._directory = directory
        self._catalog = catalog
        self._index = index
        self._log = log
        self._moves = moves

    def drop(self, keys: Sequence[bytes]) -> list[Status]:
        """OK: gone for good. BUSY: gone for this process, but after a restart it may be back."""
        self._catalog.refresh_if_due()
        with self._moves.paused() as quiet:
            places = [(key, place) for key in keys for place in self._index.drop(key)]
            noted = not places or self._note(places)
        if quiet and noted:
            return [Status.OK] * len(keys)
        self.counters["drops_not_noted"] += len(keys)
        return [Status.BUSY] * len(keys)

    def _note(self, places: Sequence[tuple[bytes, Location]]) -> bool:
        drops = [drop_of(place.generation, key, place.offset) for key, place in places]
        try:
            with self._directory.exclusive():
                return self._log.append(drops) or self._compact(drops)
        except DirectoryBusy:
            return False
        except OSError as error:
            self.counters[f"drop_errno_{error.errno}"] += 1
            return False

    def _compact(self, more: Sequence[Drop]) -> bool:
        """Write the log anew with `more`, and with some room left.

        What means former lives goes. If that is not enough, whole segments are dropped instead of
        many objects of them, those first of which nothing is left.
        """
        self._catalog.refresh()
        segments = {s.generation: s for s in self._catalog.by_age() if s.generation}
        lives: defaultdict[int, list[Drop]] = defaultdict(list)
        for drop in [*self._log.drops(), *more]:
            if drop.generation in segments:
                lives[drop.generation].append(drop)
        costs = sorted(
            (self._index.num_in(segments[generation]) > 0, -len(drops), generation)
            for generation, drops in lives.items()
        )
        total = sum(map(len, lives.values()))
        for has_more, _, generation in costs:
            if has_more and total <= MAX_KEPT:
                break
            total -= len(lives[generation]) - 1
            tail = segments[generation].tail
            lives[generation] = [Drop.all_before(generation, tail)]
            evicted = self._index.forget_before(segments[generation], tail)
            self.counters["evicted_objects"] += evicted
        self.counters["droplog_compacted"] += 1
        return self._log.rewrite([drop for drops in lives.values() for drop in drops])
