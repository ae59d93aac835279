"""The embedded storage backend: segment files in a directory (docs/storage.md)."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

from phloem.core.store import Caps, Gone, Status
from phloem.stores.adapters.segment.blockio import BlockFile, digest_of
from phloem.stores.adapters.segment.catalog import Catalog
from phloem.stores.adapters.segment.directory import META_BYTES, SegmentDirectory
from phloem.stores.adapters.segment.droplog import DropLog
from phloem.stores.adapters.segment.dropper import Dropper, Moves
from phloem.stores.adapters.segment.index import Index
from phloem.stores.adapters.segment.reader import SegmentReader
from phloem.stores.adapters.segment.writer import SegmentWriter
from phloem.stores.backend import Item, Usage, num_bytes

__all__ = ["SegmentBackend"]

NUM_WRITERS = 3  # two keep the disk busy while the third prepares its frames
SEGMENTS_PER_WRITER = 4  # at least


class SegmentBackend:
    """Objects in a bounded directory that several processes of one machine may share.

    `sync`: after each put wait until it would survive a loss of power (else only a crash of the
    process; what is lost or torn is a miss in either case).
    """

    def __init__(
        self, path: str, size_bytes: int, *, segment_bytes: int | None = None, sync: bool = False
    ) -> None:
        """Open, and scan what is there. Raises ConfigError if the directory cannot be used."""
        self._directory = SegmentDirectory(path, size_bytes, segment_bytes)
        self._index = Index()
        drops = DropLog(self._directory.dropped_path, sync=sync)
        self._catalog = Catalog(self._directory, self._index, drops)
        self._reader = SegmentReader(self._catalog, self._index)
        moves = Moves()
        self._dropper = Dropper(self._directory, self._catalog, self._index, drops, moves)
        self._sync = sync
        most = self._directory.geometry.num_segments // SEGMENTS_PER_WRITER
        self._writers = [
            SegmentWriter(self._directory, self._catalog, self._index, self._reader, moves)
            for _ in range(max(1, min(NUM_WRITERS, most)))
        ]
        # Last in, first out: a single thread always writes into one and the same segment.
        self._idle: queue.LifoQueue[SegmentWriter] = queue.LifoQueue()
        for writer in self._writers:
            self._idle.put(writer)
        self._catalog.refresh()

    @property
    def caps(self) -> Caps:
        return Caps(
            name="segment",
            max_object_bytes=self._directory.geometry.max_object_bytes,
            persistent=True,
            verifies=True,
            tells_gone=True,
        )

    def put(self, items: Sequence[Item]) -> list[Status]:
        self._catalog.refresh_if_due()
        largest = self._directory.geometry.max_object_bytes
        statuses = [Status.OK] * len(items)  # what is there already keeps its bytes
        new: dict[bytes, int] = {}
        for position, item in enumerate(items):
            if num_bytes(item) > largest:
                statuses[position] = Status.FULL
            elif item.key not in new and self._index.find(item.key) is None:
                new[item.key] = position
        written = self._append([items[position] for position in new.values()])
        outcome = dict(zip(new, written, strict=True))
        return [
            outcome.get(item.key, status) if status is Status.OK else status
            for item, status in zip(items, statuses, strict=True)
        ]

    def _append(self, items: Sequence[Item]) -> list[Status]:
        digests = [digest_of(item) for item in items]  # while other threads write
        writer = self._idle.get()
        try:
            statuses, files = writer.append(items, digests)
            return self._synced(items, statuses, files) if self._sync else statuses
        finally:
            self._idle.put(writer)

    def _synced(
        self, items: Sequence[Item], statuses: list[Status], files: set[BlockFile]
    ) -> list[Status]:
        try:
            for file in files:
                file.sync()
        except OSError:  # nobody knows what of it is safe: as if it had not been written
            for item, status in zip(items, statuses, strict=True):
                if status is Status.OK:
                    self._index.drop(item.key)
            return [Status.ERROR if status is Status.OK else status for status in statuses]
        return statuses

    def get(self, items: Sequence[Item]) -> list[Status]:
        return self._reader.get(items)

    def probe(self, keys: Sequence[bytes]) -> list[Status]:
        if any(self._index.find(key) is None for key in keys):
            self._catalog.refresh_if_due()
        found = (self._index.find(key) for key in keys)
        return [Status.MISS if place is None else Status.OK for place in found]

    def drop(self, keys: Sequence[bytes]) -> list[Status]:
        return self._dropper.drop(keys)

    def gone(self, under_way: Callable[[bytes], bool]) -> Gone:
        return self._index.gone(under_way)

    def usage(self) -> Usage:
        geometry = self._directory.geometry
        details = self._reader.counters + self._dropper.counters
        details = sum((writer.counters for writer in self._writers), details)
        return Usage(
            objects=len(self._index),
            used_bytes=self._catalog.num_files * geometry.segment_bytes + META_BYTES,
            capacity_bytes=geometry.num_segments * geometry.segment_bytes + META_BYTES,
            evicted_objects=details["evicted_objects"],
            details=tuple(sorted(details.items())),
        )

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self._catalog.clear()
        self._directory.close()
