"""Keeps what this process knows in step with the directory: opens, scans and tails segments."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import xxhash

from phloem.stores.adapters.segment.blockio import BlockFile, Scratch
from phloem.stores.adapters.segment.directory import SegmentDirectory
from phloem.stores.adapters.segment.droplog import DropLog
from phloem.stores.adapters.segment.format import (
    BLOCK,
    Entry,
    FrameHead,
    padded,
    unpack_frame_head,
    unpack_segment_head,
)
from phloem.stores.adapters.segment.index import Index, Segment

__all__ = ["Catalog"]

REFRESH_S = 0.25
# A file changed this recently may change again within the same tick of its timestamp.
MTIME_TICK_NS = 50_000_000


class Catalog:
    """The segments of a directory and the index over them."""

    def __init__(self, directory: SegmentDirectory, index: Index, drops: DropLog) -> None:
        self.segments: dict[int, Segment] = {}
        self.unreadable: set[int] = set()  # segment files that could not be opened
        self._directory = directory
        self._index = index
        self._drops = drops
        self._lock = threading.Lock()
        self._refreshed_s = -1.0
        self._scratch = Scratch()

    @property
    def num_files(self) -> int:
        return len(self.segments) + len(self.unreadable)

    def refresh_if_due(self) -> bool:
        """Look at the directory again unless that was done a moment ago."""
        if time.monotonic() - self._refreshed_s < REFRESH_S or self._lock.locked():
            return False
        self.refresh()
        return True

    def refresh(self) -> None:
        """Learn of segments that came, went, grew or began a new life."""
        with self._lock:
            self._refreshed_s = time.monotonic()
            found = self._stat_all()
            for index, segment in list(self.segments.items()):
                if index not in found or found[index].st_ino != segment.inode:
                    self._forget(segment)
            self.unreadable &= found.keys()
            changed = [s for index, stat in found.items() if (s := self._visit(index, stat))]
            for segment in changed:  # all heads first: they tell which segments are sealed
                self._try(segment, self._read_head)
            if self._drops.reload():
                self._forget_dropped()
            for segment in changed:
                self._try(segment, self._scan_frames)

    def _forget_dropped(self) -> None:
        """Another process has dropped something."""
        for key, place in self._index.places():
            entry = Entry(key, place.length, place.offset, place.digest)
            if self._drops.covers(place.generation, entry):
                self._index.forget(key, place)

    def rescan(self, segment: Segment) -> None:
        """Read the segment's frames again from where they were known to end."""
        with self._lock:
            self._try(segment, self._read_head)
            self._try(segment, self._scan_frames)

    def is_sealed(self, segment: Segment) -> bool:
        """Whether its writer has left it in order, so that no frame of it is torn."""
        return any(other.seals == segment.generation for other in list(self.segments.values()))

    def _stat_all(self) -> dict[int, os.stat_result]:
        found = {}
        for index in self._directory.segments():
            try:
                found[index] = os.stat(self._directory.segment_path(index))
            except OSError:
                continue  # it went meanwhile
        return found

    def _forget(self, segment: Segment) -> None:
        segment.broken = True  # if it is being written, the writer leaves it
        self._index.forget_segment(segment)
        del self.segments[segment.index]

    def _visit(self, index: int, stat: os.stat_result) -> Segment | None:
        """The segment, if it has to be scanned again."""
        segment = self.segments.get(index)
        if segment is None:
            try:
                file = BlockFile(self._directory.segment_path(index))
            except OSError:
                self.unreadable.add(index)
                return None
            self.unreadable.discard(index)
            segment = self.segments[index] = Segment(index, file, stat.st_ino)
        segment.mtime_ns = stat.st_mtime_ns
        if segment.owned:  # cut off under us: what is written now would lie behind a hole
            segment.broken |= stat.st_size < self._directory.geometry.segment_bytes
            return None
        if segment.scanned_ns == stat.st_mtime_ns:
            return None
        is_fresh = time.time_ns() - stat.st_mtime_ns < MTIME_TICK_NS
        segment.scanned_ns = -1 if is_fresh else stat.st_mtime_ns
        return segment

    def own(self, segment: Segment) -> None:
        """From now on this process writes the segment, and no scan touches it."""
        with self._lock:
            segment.owned = True
            self.segments[segment.index] = segment

    def disown(self, segment: Segment) -> None:
        """Anybody may write the segment from now on; until somebody does, all of it is known."""
        with self._lock:
            segment.owned = False
            segment.mtime_ns = segment.file.mtime_ns()
            segment.scanned_ns = -1 if segment.head_due else segment.mtime_ns

    def by_age(self) -> list[Segment]:
        """All segments, the one that was written last at the end; empty ones come first.

        Not by sequence, that is when a writer took it: a slow writer's segment is full of young
        objects when it is left at last.
        """
        segments = list(self.segments.values())
        return sorted(segments, key=lambda s: (s.generation != 0, s.mtime_ns, s.sequence))

    def clear(self) -> None:
        """Let go of all files."""
        with self._lock:
            for segment in list(self.segments.values()):
                self._forget(segment)

    def forget(self, segment: Segment) -> None:
        """The segment's file is gone."""
        with self._lock:
            if self.segments.get(segment.index) is segment:
                self._forget(segment)

    def _try(self, segment: Segment, step: Callable[[Segment], None]) -> None:
        """One step of a scan; a segment that cannot be read has nothing to offer."""
        try:
            step(segment)
        except OSError:
            segment.broken = True
            segment.generation = 0
            self._index.forget_segment(segment)
        finally:
            self._scratch.reset()

    def _scan_frames(self, segment: Segment) -> None:
        """Publish the frames behind the known tail.

        The last frame of an unsealed segment may be half-written: of it only those objects are
        believed that verify, and the tail stays before it.
        """
        segment.torn = None
        if segment.generation == 0:
            return
        block = self._scratch.take(BLOCK)
        end = self._directory.geometry.segment_bytes
        frames: list[FrameHead] = []
        at = segment.tail
        while at + BLOCK <= end and segment.file.read([block], at) == BLOCK:
            frame = unpack_frame_head(block, segment.generation, at, end)
            if frame is None:
                break
            frames.append(frame)
            at += frame.num_bytes
        if frames and not self.is_sealed(segment):
            last = frames.pop()
            whole = tuple(entry for entry in last.entries if self._is_whole(segment, entry))
            frames.append(last._replace(entries=whole))
            if whole != last.entries:
                at = last.offset
                segment.torn = frames[-1]
        for frame in frames:
            self._index.add(segment, self._not_dropped(segment, frame.entries))
        segment.tail = at

    def _not_dropped(self, segment: Segment, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        return tuple(e for e in entries if not self._drops.covers(segment.generation, e))

    def _read_head(self, segment: Segment) -> None:
        """Find out which life the segment is in; a new one means that its objects are gone."""
        block = self._scratch.take(BLOCK)
        got = segment.file.read([block], 0)
        head = unpack_segment_head(block) if got == BLOCK else None
        if head is not None and head.size_bytes != self._directory.geometry.segment_bytes:
            head = None
        if head is None or head.generation != segment.generation:
            self._index.forget_segment(segment)
            segment.tail = BLOCK
        segment.generation = head.generation if head else 0
        segment.sequence = head.sequence if head else 0
        segment.seals = head.seals if head else 0

    def _is_whole(self, segment: Segment, entry: Entry) -> bool:
        view = self._scratch.take(padded(entry.length))
        if segment.file.read([view], entry.offset) < entry.length:
            return False
        return bool(xxhash.xxh3_64_intdigest(view[: entry.length]) == entry.digest)
