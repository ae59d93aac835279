"""A writer: takes segments, appends frames, recycles the oldest.

free slot -> create --.
left unsealed, unlocked -> resume (once, at start) --> OWNED --full--> sealed --oldest--.
oldest sealed -> recycle, rescue what was read --'        ^_____________________________|
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import threading
from collections import Counter
from collections.abc import Sequence

from phloem.core.store import Status
from phloem.stores.adapters.segment.blockio import (
    BlockFile,
    Scratch,
    digest_of,
    fill_bounce,
    window,
)
from phloem.stores.adapters.segment.catalog import Catalog
from phloem.stores.adapters.segment.directory import DirectoryBusy, SegmentDirectory, try_flock
from phloem.stores.adapters.segment.dropper import Moves
from phloem.stores.adapters.segment.format import (
    BLOCK,
    MAX_ENTRIES,
    Entry,
    FrameHead,
    SegmentHead,
    pack_frame_head,
    pack_segment_head,
    padded,
)
from phloem.stores.adapters.segment.index import Index, Segment
from phloem.stores.adapters.segment.reader import SegmentReader
from phloem.stores.backend import Item, num_bytes

__all__ = ["SegmentWriter"]

MAX_WRITE_BYTES = 4 << 20
# At most half of a segment is rescued, so eviction makes progress, and at most a third of what was
# written, so that a store whose objects are all read is not busy with copying. On the conversation
# trace this gives 96 % of an exact LRU's hits, plain FIFO 90 % (docs/storage.md).
RESCUE_SHARE = 2
RESCUE_PER_WRITTEN = 3
MAX_RESCUE_BYTES = 64 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class SegmentWriter:
    """Appends objects to the segment that this process owns. Thread-safe: one append at a time."""

    def __init__(
        self,
        directory: SegmentDirectory,
        catalog: Catalog,
        index: Index,
        reader: SegmentReader,
        moves: Moves,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._directory = directory
        self._catalog = catalog
        self._index = index
        self._reader = reader
        self._moves = moves
        self._lock = threading.Lock()
        self._scratch = Scratch()
        self._segment: Segment | None = None
        self._may_resume = True
        self._credit_bytes = 0  # how much may be rescued
        self._completed = 0  # generation of the segment that we filled last
        self._refusal = Status.FULL  # why there is no segment

    def append(
        self, items: Sequence[Item], digests: Sequence[int]
    ) -> tuple[list[Status], set[BlockFile]]:
        """Write the objects, publish those that were written. FULL, BUSY or ERROR for the rest.

        Also returns the files that a flush must reach.
        """
        with self._lock:
            return self._append(items, digests)

    def _append(
        self, items: Sequence[Item], digests: Sequence[int]
    ) -> tuple[list[Status], set[BlockFile]]:
        statuses: list[Status] = []
        dirty: set[BlockFile] = set()
        while (first := len(statuses)) < len(items):
            frames = self._plan(items, first)
            if not frames:
                with self._moves.moving():
                    taken = self._take_segment()
                if not taken:
                    num_left = len(items) - first
                    self.counters["put_refused_" + self._refusal.value] += num_left
                    statuses += [self._refusal] * num_left
                continue
            assert self._segment is not None, "objects fit into no segment"
            end = frames[-1].stop
            dirty.add(self._segment.file)
            try:
                self._write(self._segment, items, digests, frames)
                statuses += [Status.OK] * (end - first)
                self._credit_bytes += sum(map(num_bytes, items[first:end])) // RESCUE_PER_WRITTEN
            except OSError as error:
                self._abandon(error)
                status = Status.FULL if error.errno in _NO_ROOM else Status.ERROR
                statuses += [status] * (end - first)
        return statuses, dirty

    def _plan(self, items: Sequence[Item], first: int) -> list[range]:
        """Which of the items from `first` on make the frames of one write into the segment."""
        segment = self._segment
        if segment is None or segment.broken:
            return []
        room = self._directory.geometry.segment_bytes - segment.tail
        frames: list[range] = []
        total = 0
        start = at = first
        while at < len(items):
            size = padded(num_bytes(items[at]))
            total += size
            needed = total + (len(frames) + 1) * BLOCK
            if needed > room or (at > first and total > MAX_WRITE_BYTES):
                break
            at += 1
            if at - start == MAX_ENTRIES:
                frames.append(range(start, at))
                start = at
        return [*frames, range(start, at)] if at > start else frames

    def _write(
        self,
        segment: Segment,
        items: Sequence[Item],
        digests: Sequence[int],
        frames: Sequence[range],
    ) -> None:
        """Frames behind the tail in one call, then publish them."""
        self._scratch.reset()
        views = [self._segment_head(segment)] if segment.head_due else []
        heads = []
        at = segment.tail
        for places in frames:
            block = self._scratch.take(BLOCK)
            views.append(block)
            start, at = at, at + BLOCK
            entries = []
            for place in places:
                item = items[place]
                win = window(item, self._scratch)
                fill_bounce(item, win)
                views += win.views
                length = num_bytes(item)
                entries.append(Entry(item.key, length, at, digests[place]))
                at += padded(length)
            heads.append(FrameHead(start, at - start, tuple(entries)))
            block[:] = pack_frame_head(segment.generation, heads[-1])
        segment.file.write(views, 0 if segment.head_due else segment.tail)
        segment.head_due = False
        for head in heads:
            self._index.add(segment, head.entries)
        self.counters["written_bytes"] += at - segment.tail
        segment.tail = at

    def _segment_head(self, segment: Segment) -> memoryview:
        size = self._directory.geometry.segment_bytes
        head = SegmentHead(size, segment.generation, segment.sequence, segment.seals)
        block = self._scratch.take(BLOCK)
        block[:] = pack_segment_head(head)
        return block

    def _abandon(self, error: OSError) -> None:
        """A write failed: what is at the tail is not known, so nobody shall take it for a frame."""
        self.counters[f"write_errno_{error.errno}"] += 1
        segment = self._segment
        if segment is None:
            return
        with contextlib.suppress(OSError):
            self._scratch.reset()
            block = self._scratch.take(BLOCK)
            block[:] = bytes(BLOCK)
            segment.file.write([block], segment.tail)
        segment.broken = error.errno not in _NO_ROOM
        self._leave()

    def _leave(self) -> None:
        """Stop writing the current segment; it may be recycled from now on."""
        segment = self._segment
        self._segment = None
        if segment is None:
            return
        self._release(segment)

    def _release(self, segment: Segment) -> None:
        self._catalog.disown(segment)
        with contextlib.suppress(OSError):
            fcntl.flock(segment.file.fd, fcntl.LOCK_UN)

    def _take_segment(self) -> bool:
        """Own a segment with room, or say in `_refusal` why there is none."""
        full = self._segment
        if full is not None and not full.broken:
            self._completed = full.generation
        self._leave()
        try:
            with self._directory.exclusive():
                self._catalog.refresh()
                segment, rescued = self._find_segment()
        except DirectoryBusy:
            self._refusal = Status.BUSY
            return False
        except OSError as error:
            self.counters[f"take_errno_{error.errno}"] += 1
            self._refusal = Status.ERROR
            return False
        self._segment = segment
        self._refusal = Status.FULL
        if rescued and segment is not None:
            self._rewrite(segment, rescued)
        return segment is not None

    def _find_segment(self) -> tuple[Segment | None, list[Item]]:
        if self._may_resume:
            self._may_resume = False
            resumed = self._resume()
            if resumed is not None:
                return resumed, []
        if self._catalog.num_files < self._directory.geometry.num_segments:
            created = self._create()
            if created is not None:
                return created, []
        recycled = self._recycle()
        if recycled is not None:
            return recycled
        return (self._create() if self._remove_unusable() else None), []

    def _resume(self) -> Segment | None:
        """The youngest segment that a former process left with room in it."""
        size = self._directory.geometry.segment_bytes
        for segment in reversed(self._catalog.by_age()):
            has_room = segment.generation and segment.tail < size - size // 8
            if segment.owned or segment.broken or not has_room:
                continue
            if not self._catalog.is_sealed(segment) and try_flock(segment.file.fd):
                generation = segment.generation
                self._catalog.rescan(segment)
                self._catalog.own(segment)
                is_same = segment.generation == generation
                if is_same and self._mend(segment):
                    self.counters["segments_resumed"] += 1
                    return segment
                self._release(segment)
        return None

    def _mend(self, segment: Segment) -> bool:
        """A torn last frame: keep what of it is whole, or write over it if nothing is."""
        torn = segment.torn
        segment.torn = None
        if torn is None or not torn.entries:
            return True
        self._scratch.reset()
        block = self._scratch.take(BLOCK)
        block[:] = pack_frame_head(segment.generation, torn)
        try:
            segment.file.write([block], torn.offset)
        except OSError as error:
            self.counters[f"write_errno_{error.errno}"] += 1
            segment.broken = True
            return False
        segment.tail = torn.offset + torn.num_bytes
        self.counters["frames_mended"] += 1
        return True

    def _create(self) -> Segment | None:
        used = self._directory.segments()
        index = next(i for i in range(len(used) + 1) if i not in used)
        path = self._directory.segment_path(index)
        try:
            file = BlockFile(path, create_bytes=self._directory.geometry.segment_bytes)
        except OSError as error:
            self.counters[f"create_errno_{error.errno}"] += 1
            return None
        segment = Segment(index, file, os.fstat(file.fd).st_ino)
        if not try_flock(file.fd) or not self._begin(segment):
            self._catalog.forget(segment)
            self._directory.remove(index)
            return None
        self.counters["segments_created"] += 1
        return segment

    def _begin(self, segment: Segment) -> bool:
        """Start a new life of a segment of which this process holds the lock."""
        self._catalog.own(segment)
        youngest = max((s.sequence for s in self._catalog.by_age()), default=0)
        segment.generation = secrets.randbits(63) | 1
        segment.sequence = youngest + 1
        segment.seals, self._completed = self._completed, 0
        segment.tail = BLOCK
        segment.head_due = True
        try:
            segment.file.preallocate(self._directory.geometry.segment_bytes)
        except OSError as error:
            self.counters[f"begin_errno_{error.errno}"] += 1
            segment.generation = 0
            segment.broken = error.errno not in _NO_ROOM
            return False
        return True

    def _recycle(self) -> tuple[Segment, list[Item]] | None:
        """The oldest segment that nobody writes, and what of it deserves another round."""
        for segment in self._catalog.by_age():
            # `owned` first: our other writer's lock on the same file would not stop us.
            if segment.owned or segment.broken or not try_flock(segment.file.fd):
                continue
            self._catalog.own(segment)
            rescued = self._read_referenced(segment)
            evicted = self._index.forget_segment(segment, {item.key for item in rescued})
            if self._begin(segment):
                self.counters["evicted_objects"] += evicted - len(rescued)
                self.counters["segments_recycled"] += 1
                return segment, rescued
            self.counters["evicted_objects"] += evicted
            self._index.lose(item.key for item in rescued)
            self._release(segment)
        return None

    def _read_referenced(self, segment: Segment) -> list[Item]:
        """Second chance: copies of objects that were read since they were written here."""
        most = min(self._directory.geometry.segment_bytes // RESCUE_SHARE, MAX_RESCUE_BYTES)
        budget = self._credit_bytes = min(self._credit_bytes, most)
        places = self._index.referenced_in(segment)
        sizes = [padded(place.length) for _, place in places]
        chosen = [i for i, reach in enumerate(itertools.accumulate(sizes)) if reach <= budget]
        self._credit_bytes -= sum(sizes[i] for i in chosen)
        memory = Scratch(max(BLOCK, sum(sizes[i] for i in chosen)))
        items = []
        for i in chosen:
            key, place = places[i]
            items.append(Item(key, (memory.take(sizes[i])[: place.length],)))
        statuses = self._reader.get(items)
        return [item for item, s in zip(items, statuses, strict=True) if s is Status.OK]

    def _rewrite(self, segment: Segment, rescued: list[Item]) -> None:
        digests = [digest_of(item) for item in rescued]
        at = 0
        try:
            while at < len(rescued):
                frames = self._plan(rescued, at)
                self._write(segment, rescued, digests, frames)
                at = frames[-1].stop
            self.counters["rescued_objects"] += len(rescued)
        except OSError as error:
            self._abandon(error)
            self._index.lose(item.key for item in rescued[at:])

    def _remove_unusable(self) -> bool:
        """Nothing else is left: make room by removing a file that cannot be opened or written."""
        broken = {
            segment.index: segment
            for segment in self._catalog.by_age()
            if segment.broken and not segment.owned and try_flock(segment.file.fd)
        }
        for index in [*sorted(self._catalog.unreadable), *broken]:
            with contextlib.suppress(OSError):
                self._directory.remove(index)
                self._catalog.unreadable.discard(index)
                if index in broken:
                    self._catalog.forget(broken[index])
                self.counters["unusable_removed"] += 1
                return True
        return False

    def close(self) -> None:
        """Leave the segment unsealed: the next process goes on in it."""
        with self._lock:
            self._leave()
