"""`phloem bench stores`: the segment store against raw O_DIRECT I/O and one file per page.

    raw      blocks of one preallocated, fully written file
    store    the whole guarded store, as the tier controller drives it; full and recycling
    files    one file per page: write, (fsync,) rename; open, read, close

Samples are quads (paired.py) of slices of the same bytes, moved by the same number of threads to
and from the same aligned memory, on one filesystem. What is read was written a turn before and
comes from the device. Where on the disk files come to lie makes a difference, so each comparison is
spread over several *lives*: everything is made anew, in the other order. Of reads and writes the
*slower* ratio is `store_over_raw_*`; what it costs when everything is read, and so carried over, is
`store_write_all_kept_over_raw_256k`. Against files without `_no_sync` means: after a slice all of
it would survive a loss of power, in both. `aa_control_1m`: raw against raw.

`store_over_file_per_page` is durable writes and reads of the same bytes, over all sizes (geometric
mean); `store_write_over_file_per_page` the writes alone, since reads of both sides come at the
disk's own speed.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from phloem.bench.paired import Budget, Quad, quad, ratio_result, result
from phloem.bench.store_rivals import FilePerPage, RawBlocks, Rival, Segments

__all__ = ["run"]

SIZES = {"64k": 64 << 10, "256k": 256 << 10, "1m": 1 << 20}
SLICE_BYTES = 64 << 20
SMALL_SLICE_BYTES = 16 << 20  # where each page is waited for

_Open = Callable[[str], Rival]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lives:
    """At most so many, no new one after so many seconds, and what each may take."""

    most: int
    seconds: float
    each: Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How long each comparison takes."""

    raw: _Lives
    files: _Lives
    few: _Lives  # what is no headline


_FULL = _Plan(
    raw=_Lives(most=5, seconds=12.0, each=Budget(seconds=2.0, fewest=2)),
    files=_Lives(most=3, seconds=8.0, each=Budget(seconds=2.5, fewest=2)),
    few=_Lives(most=1, seconds=0.0, each=Budget(seconds=2.0, fewest=2)),
)
_QUICK = _Plan(
    raw=_Lives(most=2, seconds=2.0, each=Budget(seconds=0.8, fewest=1)),
    files=_Lives(most=1, seconds=0.0, each=Budget(seconds=0.8, fewest=1)),
    few=_Lives(most=1, seconds=0.0, each=Budget(seconds=0.5, fewest=1)),
)


@dataclass(slots=True)
class _Samples:
    """Quads of one comparison."""

    writes: list[Quad]
    reads: list[Quad]

    @property
    def both(self) -> list[Quad]:
        return [write + read for write, read in zip(self.writes, self.reads, strict=True)]


def run(quick: bool = False) -> dict[str, Any]:
    """Measure; about two minutes (quick: half a minute), 1.2 GB of disk in this directory."""
    plan = _QUICK if quick else _FULL
    memory = memoryview(mmap.mmap(-1, SLICE_BYTES))
    memory[:] = os.urandom(1 << 20) * (SLICE_BYTES >> 20)  # all of it is there from now on
    results: list[dict[str, Any]] = []
    for label, size in SIZES.items():
        results += _against_raw(memory, label, size, plan)
    results += _extras(memory, plan)
    for label, size in SIZES.items():
        results += _against_files(memory[:SMALL_SLICE_BYTES], label, size, plan)
    headlines = ("store_write_over_file_per_page", "store_over_file_per_page")
    return {"bench": "stores", "results": results + [_over_sizes(results, h) for h in headlines]}


def _over_sizes(results: Iterable[dict[str, Any]], name: str) -> dict[str, Any]:
    """The geometric mean of a result over all sizes; its samples are the sizes' medians."""
    by_name = {each["name"]: each["value"] for each in results}
    values = [by_name[f"{name}_{label}"] for label in SIZES]
    return result(name, math.exp(statistics.fmean(map(math.log, values))), values)


def _against_raw(memory: memoryview, label: str, size: int, plan: _Plan) -> list[dict[str, Any]]:
    raw = partial(RawBlocks, slice_=memory, size=size)
    store = partial(Segments, slice_=memory, size=size, sync=False)
    samples = _compare(raw, store, plan.raw)
    out = [
        ratio_result(f"store_write_over_raw_{label}", samples.writes),
        ratio_result(f"store_read_over_raw_{label}", samples.reads),
    ]
    slower = min(each["value"] for each in out)
    out.append(result(f"store_over_raw_{label}", slower, [each["value"] for each in out]))
    out += _speeds(samples.writes, f"write_{label}", len(memory))
    out += _speeds(samples.reads, f"read_{label}", len(memory))
    return out


def _extras(memory: memoryview, plan: _Plan) -> list[dict[str, Any]]:
    """What everything read costs the writes, and what a ratio of equals looks like."""
    size = SIZES["256k"]
    raw = partial(RawBlocks, slice_=memory, size=size)
    store = partial(Segments, slice_=memory, size=size, sync=False, keep_read=True)
    kept = _compare(raw, store, plan.few)
    raw = partial(RawBlocks, slice_=memory, size=SIZES["1m"])
    control = _compare(raw, raw, plan.few)
    return [
        ratio_result("store_write_all_kept_over_raw_256k", kept.writes),
        ratio_result("aa_control_1m", control.writes),
    ]


def _against_files(memory: memoryview, label: str, size: int, plan: _Plan) -> list[dict[str, Any]]:
    """Durable writes, reads, and both of the same bytes; at one size also without any fsync."""
    out: list[dict[str, Any]] = []
    both = (("_no_sync", False), ("", True))
    for suffix, sync in both if label == "256k" else both[1:]:
        files = partial(FilePerPage, slice_=memory, size=size, sync=sync)
        store = partial(Segments, slice_=memory, size=size, sync=sync)
        samples = _compare(files, store, plan.files if sync else plan.few)
        parts = (("_write", samples.writes), ("_read", samples.reads), ("", samples.both))
        for verb, quads in parts:
            out.append(ratio_result(f"store{verb}_over_file_per_page{suffix}_{label}", quads))
    return out


def _compare(other: _Open, mine: _Open, lives: _Lives) -> _Samples:
    """Writes and reads of both, turn by turn; what a turn reads the turn before has written."""
    samples = _Samples([], [])
    end = time.perf_counter() + lives.seconds
    for life in range(lives.most):
        if life and time.perf_counter() > end:
            break
        with _directories() as paths, _opened((other, mine), paths, life) as (a, b):
            for turn in lives.each.turns():
                samples.writes.append(quad(a.write, b.write, turn))
                a.prepare_read()
                b.prepare_read()
                samples.reads.append(quad(a.read, b.read, turn))
    return samples


@contextmanager
def _opened(opens: tuple[_Open, _Open], paths: list[str], life: int) -> Iterator[list[Rival]]:
    order = (0, 1) if life % 2 else (1, 0)
    rivals = {which: opens[which](paths[which]) for which in order}
    try:
        yield [rivals[0], rivals[1]]
    finally:
        for rival in rivals.values():
            rival.close()


@contextmanager
def _directories() -> Iterator[list[str]]:
    path = tempfile.mkdtemp(prefix=".bench-stores-", dir=os.getcwd())
    try:
        paths = [os.path.join(path, name) for name in ("other", "mine")]
        for each in paths:
            os.mkdir(each)
        yield paths
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _speeds(quads: list[Quad], what: str, num_bytes: int) -> list[dict[str, Any]]:
    """GB/s of both sides, each as the median of its own samples."""
    out = []
    for side, times in (("raw", [q.other_s for q in quads]), ("store", [q.mine_s for q in quads])):
        speeds = [round(2 * num_bytes / each / 1e9, 3) for each in times]
        out.append(result(f"{side}_{what}", statistics.median(speeds), speeds, "GB/s"))
    return out
