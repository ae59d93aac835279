"""A storage directory as an operator sees it: what is there, whether it is whole, empty it.

Safe beside running engines: listing and verifying only read, clearing refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from phloem.core.errors import ConfigError
from phloem.core.store import Status
from phloem.stores.adapters.segment.catalog import Catalog
from phloem.stores.adapters.segment.directory import (
    META_BYTES,
    SegmentDirectory,
    read_geometry,
)
from phloem.stores.adapters.segment.droplog import DropLog
from phloem.stores.adapters.segment.index import Index
from phloem.stores.adapters.segment.reader import SegmentReader
from phloem.stores.backend import Item

__all__ = ["DirectoryView", "StoredObject", "VerifyReport"]

BATCH_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One object: key, length, and where it lies."""

    key: bytes
    length: int
    segment: int
    offset: int


@dataclass(slots=True)
class VerifyReport:
    """What reading everything has brought."""

    objects: int = 0
    num_bytes: int = 0
    statuses: Counter[Status] = field(default_factory=Counter)
    bad: list[bytes] = field(default_factory=list)  # keys whose bytes are not what was put

    @property
    def good(self) -> bool:
        return not self.bad


class DirectoryView:
    """An existing directory, opened with the size it has. Close it. Raises ConfigError."""

    def __init__(self, path: str) -> None:
        geometry = read_geometry(path)
        if geometry is None:
            raise ConfigError(f"{path} is no storage directory (it has no phloem-store.json)")
        self.geometry = geometry
        size = geometry.segment_bytes * geometry.num_segments

        self._directory = SegmentDirectory(path, size + META_BYTES, geometry.segment_bytes)
        self._index = Index()
        drops = DropLog(self._directory.dropped_path)
        self._catalog = Catalog(self._directory, self._index, drops)
        self._catalog.refresh()

    @property
    def num_segments(self) -> int:
        return self._catalog.num_files

    @property
    def used_bytes(self) -> int:
        return self._catalog.num_files * self.geometry.segment_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.geometry.num_segments * self.geometry.segment_bytes

    @property
    def unreadable(self) -> int:
        """Segment files that could not be opened."""
        return len(self._catalog.unreadable)

    def objects(self) -> list[StoredObject]:
        """Everything, in the order of writing."""
        found = sorted(
            self._index.places(), key=lambda item: (item[1].segment.sequence, item[1].offset)
        )
        return [
            StoredObject(
                key=key, length=place.length, segment=place.segment.index, offset=place.offset
            )
            for key, place in found
        ]

    def verify(self) -> VerifyReport:
        """Read every object and compare its checksum. What is evicted meanwhile counts as MISS."""
        reader = SegmentReader(self._catalog, self._index)
        report = VerifyReport()
        for batch in _batches(self.objects()):
            items = [Item(each.key, (memoryview(bytearray(each.length)),)) for each in batch]
            for each, status in zip(batch, reader.get(items), strict=True):
                report.objects += 1
                report.num_bytes += each.length
                report.statuses[status] += 1
                if status is not Status.OK and self._still_there(each):
                    report.bad.append(each.key)
        return report

    def _still_there(self, each: StoredObject) -> bool:
        """Whether a bad object's segment is still in the same life: else it was only evicted."""
        segment = self._catalog.segments.get(each.segment)
        return segment is not None and each.key in segment.keys

    def clear(self) -> int:
        """Remove all segments; returns how many. Raises ConfigError while an engine uses it."""
        removed = self._directory.clear()
        self._catalog.refresh()
        return removed

    def close(self) -> None:
        self._catalog.clear()
        self._directory.close()


def _batches(objects: list[StoredObject]) -> Iterator[list[StoredObject]]:
    batch: list[StoredObject] = []
    total = 0
    for each in objects:
        if batch and total + each.length > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(each)
        total += each.length
    if batch:
        yield batch
