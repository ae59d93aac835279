"""Reads objects: neighbours on disk in one call, straight into the caller's buffers, verified."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from phloem.core.store import Status
from phloem.stores.adapters.segment.blockio import (
    IOV_MAX,
    BlockFile,
    Scratch,
    Window,
    digest_of,
    drain_bounce,
    window,
)
from phloem.stores.adapters.segment.catalog import Catalog
from phloem.stores.adapters.segment.format import BLOCK, padded, unpack_segment_head
from phloem.stores.adapters.segment.index import Index, Location
from phloem.stores.backend import Item, num_bytes

__all__ = ["SegmentReader"]

MAX_RUN_BYTES = 4 << 20
MAX_GAP_BYTES = BLOCK  # a frame head between two objects is read over


class _Wanted(NamedTuple):
    position: int
    item: Item
    place: Location


class SegmentReader:
    """Reads for any number of threads; what cannot be trusted is forgotten and reported."""

    def __init__(self, catalog: Catalog, index: Index) -> None:
        self.counters: Counter[str] = Counter()
        self._catalog = catalog
        self._index = index
        self._local = threading.local()

    def get(self, items: Sequence[Item]) -> list[Status]:
        """Fill the items' buffers; one status each."""
        statuses = [Status.MISS] * len(items)
        wanted = self._locate(items)
        if len(wanted) < len(items) and self._catalog.refresh_if_due():
            wanted = self._locate(items)
        wanted.sort(key=lambda w: (w.place.segment.index, w.place.offset))
        for run in _runs(wanted):
            for want, status in zip(run, self._read_run(run), strict=True):
                statuses[want.position] = status
        return statuses

    def _locate(self, items: Sequence[Item]) -> list[_Wanted]:
        wanted = []
        for position, item in enumerate(items):
            place = self._index.find(item.key)
            if place is not None and place.length == num_bytes(item):
                wanted.append(_Wanted(position, item, place))
        return wanted

    def _scratch(self) -> Scratch:
        scratch: Scratch | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = Scratch()
        scratch.reset()
        return scratch

    def _read_run(self, run: Sequence[_Wanted]) -> list[Status]:
        file = run[0].place.segment.file
        scratch = self._scratch()
        windows, views = _scatter(run, scratch)
        try:
            got = file.read(views, run[0].place.offset)
        except OSError as error:
            self.counters[f"read_errno_{error.errno}"] += 1
            if len(run) == 1:
                self._index.forget(run[0].item.key, run[0].place)
                return [Status.ERROR]
            return [status for want in run for status in self._read_run([want])]
        end = run[0].place.offset + got
        return [self._finish(w, win, end, file) for w, win in zip(run, windows, strict=True)]

    def _finish(self, want: _Wanted, win: Window, end: int, file: BlockFile) -> Status:
        """Verify one object of a run of which everything before `end` was read."""
        key, place = want.item.key, want.place
        is_there = place.offset + place.length <= end
        if is_there:
            drain_bounce(want.item, win)
            if digest_of(want.item) == place.digest:
                place.referenced = True
                self.counters["read_bytes"] += place.length
                return Status.OK
        if self._index.find(key) is not place:
            return Status.MISS  # evicted while we read
        if self._was_recycled(place, file):
            self._index.forget(key, place)
            return Status.MISS
        self._index.forget(key, place)
        self.counters["corrupt" if is_there else "truncated"] += 1
        return Status.CORRUPT if is_there else Status.MISS

    def _was_recycled(self, place: Location, file: BlockFile) -> bool:
        """Whether another process gave the segment a new life."""
        block = self._scratch().take(BLOCK)
        try:
            head = unpack_segment_head(block) if file.read([block], 0) == BLOCK else None
        except OSError:
            return False
        return head is not None and head.generation != place.generation


def _scatter(run: Sequence[_Wanted], scratch: Scratch) -> tuple[list[Window], list[memoryview]]:
    windows: list[Window] = []
    views: list[memoryview] = []
    at = run[0].place.offset
    for want in run:
        if want.place.offset > at:
            views.append(scratch.take(want.place.offset - at))
        win = window(want.item, scratch)
        windows.append(win)
        views += win.views
        at = want.place.offset + padded(want.place.length)
    return windows, views


def _runs(wanted: Sequence[_Wanted]) -> list[list[_Wanted]]:
    """Cut into runs of neighbours that one read can serve."""
    runs: list[list[_Wanted]] = []
    views = 0
    for want in wanted:
        views += len(want.item.parts) + 2
        if runs and _continues(runs[-1], want) and views < IOV_MAX:
            runs[-1].append(want)
        else:
            runs.append([want])
            views = len(want.item.parts) + 2
    return runs


def _continues(run: Sequence[_Wanted], want: _Wanted) -> bool:
    last, place = run[-1].place, want.place
    gap = place.offset - (last.offset + padded(last.length))
    reach = place.offset + padded(place.length) - run[0].place.offset
    return (
        place.segment is last.segment
        and place.generation == last.generation
        and 0 <= gap <= MAX_GAP_BYTES
        and reach <= MAX_RUN_BYTES
    )
