"""Where every object is: a dict in memory, rebuilt from the segments' own headers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable

from phloem.core.store import Gone
from phloem.stores.adapters.segment.blockio import BlockFile
from phloem.stores.adapters.segment.format import Entry, FrameHead
from phloem.stores.losses import Losses

__all__ = ["Index", "Location", "Segment"]


class Segment:
    """A segment file as this process knows it."""

    def __init__(self, index: int, file: BlockFile, inode: int) -> None:
        self.index = index
        self.file = file
        self.inode = inode
        self.generation = 0  # 0: no valid head was found
        self.sequence = 0
        self.seals = 0  # the generation of the segment that its writer completed before
        self.head_due = False  # owned, and its new head will be written with the first frame
        self.tail = 0  # bytes that are known to be frames; what comes next is not known
        self.torn: FrameHead | None = None  # the frame at the tail: only these entries are whole
        self.owned = False  # we write it: nobody else does
        self.broken = False  # an I/O error: not used for writing any more
        self.mtime_ns = 0
        self.scanned_ns = -1  # its mtime when it was scanned; -1: scan it again
        self.keys: list[bytes] = []  # of its entries, also those that moved elsewhere


class Location:
    """Where one object lies. Valid as long as the index holds this very instance."""

    __slots__ = ("digest", "generation", "length", "offset", "referenced", "segment")

    def __init__(self, segment: Segment, entry: Entry) -> None:
        self.segment = segment
        self.generation = segment.generation
        self.length = entry.length
        self.offset = entry.offset
        self.digest = entry.digest
        self.referenced = False  # read since it was written or last rescued

    def is_same(self, other: Location) -> bool:
        """Whether it is one and the same copy on disk."""
        return (
            self.segment is other.segment
            and self.generation == other.generation
            and self.offset == other.offset
        )


class Index:
    """key -> Location. Keys are compared in full (a dict does). Thread-safe."""

    def __init__(self) -> None:
        self._places: dict[bytes, Location] = {}
        self._copies: dict[bytes, list[Location]] = {}  # older ones: two processes wrote the same
        self._losses = Losses()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, key: bytes) -> Location | None:
        return self._places.get(key)

    def places(self) -> list[tuple[bytes, Location]]:
        """All objects, as they are now."""
        with self._lock:
            return list(self._places.items())

    def add(self, segment: Segment, entries: tuple[Entry, ...]) -> None:
        """Publish entries of `segment`; of two copies the one in the younger segment counts."""
        with self._lock:
            for entry in entries:
                new, old = Location(segment, entry), self._places.get(entry.key)
                segment.keys.append(entry.key)
                if old is None or old.is_same(new):
                    self._places[entry.key] = new
                    continue
                if old.segment.sequence <= segment.sequence:
                    self._places[entry.key], new = new, old
                copies = self._copies.setdefault(entry.key, [])
                if not any(copy.is_same(new) for copy in copies):
                    copies.append(new)

    def forget(self, key: bytes, location: Location | None = None) -> bool:
        """Remove a key; with `location` only if it is still there, and then it counts as lost.

        Returns whether it was removed.
        """
        with self._lock:
            found = self._places.get(key)
            if found is None or (location is not None and found is not location):
                return False
            del self._places[key]
            if location is not None:
                self._losses.add(key)
            return True

    def drop(self, key: bytes) -> list[Location]:
        """Remove a key on request; returns all places where it lay."""
        with self._lock:
            place = self._places.pop(key, None)
            copies = self._copies.pop(key, [])
            return copies if place is None else [place, *copies]

    def forget_before(self, segment: Segment, offset: int) -> int:
        """Remove what lies in `segment` before `offset`; returns how many objects were lost."""
        with self._lock:
            places = [
                (key, place) for key, place in self._places.items() if place.segment is segment
            ]
            lost = [key for key, place in places if place.offset < offset]
            for key in lost:
                del self._places[key]
                self._losses.add(key)
        return len(lost)

    def num_in(self, segment: Segment) -> int:
        """How many objects lie there."""
        with self._lock:
            places = (self._places.get(key) for key in set(segment.keys))
            return sum(place is not None and place.segment is segment for place in places)

    def forget_segment(self, segment: Segment, kept: Container[bytes] = ()) -> int:
        """Remove all that lies in `segment`; returns how many objects that were.

        All count as lost but those `kept`, that are about to be written anew.
        """
        count = 0
        with self._lock:
            for key in segment.keys:
                found = self._places.get(key)
                if found is not None and found.segment is segment:
                    del self._places[key]
                    count += 1
                    if key not in kept:
                        self._losses.add(key)
                self._forget_copies(key, segment)
            segment.keys.clear()
        return count

    def _forget_copies(self, key: bytes, segment: Segment) -> None:
        copies = self._copies.pop(key, None)
        if copies is not None:
            left = [copy for copy in copies if copy.segment is not segment]
            if left:
                self._copies[key] = left

    def lose(self, keys: Iterable[bytes]) -> None:
        """Objects that were kept have not been written anew after all."""
        with self._lock:
            for key in keys:
                self._losses.add(key)

    def gone(self, under_way: Callable[[bytes], bool]) -> Gone:
        """What was lost since the last call, and is neither here nor `under_way`."""
        with self._lock:
            return self._losses.take(self._places.__contains__, under_way)

    def referenced_in(self, segment: Segment) -> list[tuple[bytes, Location]]:
        """The objects of `segment` that were read since they were written there."""
        with self._lock:
            found = ((key, self._places.get(key)) for key in segment.keys)
            return [
                (key, place)
                for key, place in found
                if place is not None and place.segment is segment and place.referenced
            ]
