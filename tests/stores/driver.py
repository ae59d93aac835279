"""A torch-free process that drives segment stores and is killed, over and over.

    python -m tests.stores.driver kill DIR SEED NUM_POINTS    prints one JSON line
    python -m tests.stores.driver share DIR SEED NUM_PROCESSES SECONDS

Every life is a fork of this process: imports cost nothing, memory starts equal. Half of the lives
die inside a write system call of which only a part reached the file (a torn write); the others are
killed from outside at a random moment, with two threads at work.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from phloem.core.store import Status
from phloem.stores.adapters.segment import SegmentBackend, blockio, droplog
from phloem.stores.adapters.segment.format import BLOCK
from tests.stores.rig import OK, Rig, item_of, make_rig

SIZE_BYTES = 4 << 20
SEGMENT_BYTES = 256 << 10
LENGTHS = (1000, 4096, 20_000)
NUM_NAMES = 600


def length_of(name: int) -> int:
    return LENGTHS[name % len(LENGTHS)]


def open_backend(path: str) -> SegmentBackend:
    return SegmentBackend(path, SIZE_BYTES, segment_bytes=SEGMENT_BYTES)


def disk_bytes(path: str) -> int:
    """What the directory's files occupy: the larger of length and blocks, file by file."""
    total = 0
    for entry in os.scandir(path):
        stat = entry.stat()
        total += max(stat.st_size, stat.st_blocks * 512)
    return total


def die_in_write(after_calls: int, draw: random.Random) -> None:
    """The n-th write from now on is cut at a block border somewhere, then the process is gone."""
    real = os.pwritev
    left = after_calls

    def torn(fd: int, views: Sequence[memoryview], offset: int) -> int:
        nonlocal left
        left -= 1
        if left > 0:
            return real(fd, views, offset)
        blocks = sum(len(view) for view in views) // BLOCK
        keep = draw.randrange(blocks + 1) * BLOCK
        for view in views:
            part = view[: min(len(view), keep)]
            if len(part):
                real(fd, [part], offset)
            offset += len(part)
            keep -= len(part)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    real_log = os.pwrite

    def torn_log(fd: int, data: bytes, offset: int) -> int:
        if draw.random() < 0.9:
            return real_log(fd, data, offset)
        real_log(fd, data[: draw.randrange(len(data) + 1)], offset)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    blockio.os.pwritev = torn
    droplog.os.pwrite = torn_log


class Log:
    """Names in the order of their acknowledgement; survives its writer (shared memory)."""

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, 1 << 20)

    def clear(self) -> None:
        self.map[:4] = bytes(4)

    def add(self, name: int) -> None:
        count = int.from_bytes(self.map[:4], "little") + 1
        self.map[count * 4 : count * 4 + 4] = name.to_bytes(4, "little")
        self.map[:4] = count.to_bytes(4, "little")

    def names(self) -> list[int]:
        count = int.from_bytes(self.map[:4], "little")
        data = self.map[4 : 4 + 4 * count]
        return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]


class Logs(NamedTuple):
    """`put` is of one life; the others are kept, as a dropped name is never put again."""

    put: Log
    dropping: Log  # about to be dropped: may be there or not
    dropped: Log


def live(path: str, seed: int, logs: Logs, first_name: int) -> None:
    """Put new names, read and drop old ones, until killed (or for a bounded time)."""
    draw = random.Random(seed)
    if draw.random() < 0.5:
        die_in_write(draw.randrange(1, 25), draw)
    rig = make_rig(open_backend(path))
    name = first_name
    for _ in range(400):
        length = draw.choice(LENGTHS)
        batch = []
        for _ in range(draw.randrange(1, 10)):
            while length_of(name) != length:
                name += 1
            batch.append(name)
            name += 1
        for done, status in zip(batch, rig.put(batch, length), strict=True):
            if status is OK:
                logs.put.add(done)
        if draw.random() < 0.4:
            drop(rig, logs, [draw.randrange(max(first_name, name - 30), name) for _ in range(2)])
        old = draw.randrange(max(1, name - 60), name)
        rig.get([old], length_of(old))


def drop(rig: Rig, logs: Logs, names: list[int]) -> None:
    for name in names:
        logs.dropping.add(name)
    if set(rig.drop(names)) == {OK}:
        for name in names:
            logs.dropped.add(name)


def check(path: str, logs: Logs, newest: int) -> dict[str, int]:
    """After a death: bound, no wrong page, what is offered is there, what was promised is there,
    and nothing that was dropped in this life or a former one."""
    backend = open_backend(path)
    assert disk_bytes(path) <= SIZE_BYTES, "bound exceeded"
    names = range(max(0, newest - NUM_NAMES), newest + 200)
    offered = 0
    with make_rig(backend) as rig:
        for length in LENGTHS:
            mine = [name for name in names if length_of(name) == length]
            probed = rig.probe(mine)
            for at in range(0, len(mine), 100):
                got = rig.get(mine[at : at + 100], length)
                for name, before, status in zip(
                    mine[at:], probed[at : at + 100], got, strict=False
                ):
                    assert status is before, f"{name} was offered as {before}, got as {status}"
                offered += got.count(OK)
        dropping = set(logs.dropping.names())
        promised = [name for name in logs.put.names()[-40:] if name not in dropping]
        for name in promised:
            assert rig.get([name], length_of(name)) == (OK,), f"acknowledged {name} is lost"
        dropped = logs.dropped.names()
        back = [n for n, s in zip(dropped, rig.probe(dropped), strict=True) if s is OK]
        assert not back, f"dropped {back} are offered again"
    return {"offered": offered, "promised": len(promised)}


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(code)
    raise AssertionError("unreachable")


def kill_after(pid: int, log: Log, num_objects: int, draw: random.Random) -> int:
    """Kill a moment after so many objects, unless it dies by itself; returns its wait status."""
    end = time.monotonic() + 5.0
    while len(log.names()) < num_objects and time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.0005)
    time.sleep(draw.uniform(0, 0.02))
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def kill_loop(path: str, seed: int, num_points: int) -> dict[str, int]:
    draw = random.Random(seed)
    logs = Logs(Log(), Log(), Log())
    totals = {"points": 0, "killed": 0, "offered": 0, "promised": 0, "failed": 0}
    name = 0
    result = mmap.mmap(-1, 4096)
    for point in range(num_points):
        logs.put.clear()
        first = name
        pid = fork(lambda p=point, f=first: live(path, seed * 1000 + p, logs, f))
        wait_for = draw.choice([0, 1, 10, 30])  # acknowledged objects; 0: perhaps while opening
        totals["killed"] += os.WIFSIGNALED(kill_after(pid, logs.put, wait_for, draw))
        name = max([first, *logs.put.names()]) + 30  # names of a batch in flight are not used again

        def verify(newest: int = name) -> None:
            data = json.dumps(check(path, logs, newest)).encode()
            result[: len(data) + 1] = data + b"\0"

        _, code = os.waitpid(fork(verify), 0)
        totals["points"] += 1
        if code:
            totals["failed"] += 1
            continue
        found = json.loads(bytes(result[:]).split(b"\0")[0])
        totals["offered"] += found["offered"]
        totals["promised"] += found["promised"]
    totals["dropped"] = len(logs.dropped.names())
    return totals


def share_loop(path: str, seed: int, num_processes: int, seconds: float) -> dict[str, int]:
    """Several processes put and get the same small set of names in one directory."""
    counts = mmap.mmap(-1, 4096)

    def work(me: int) -> None:
        draw = random.Random(seed * 100 + me)
        backend = open_backend(path)
        mine: set[int] = set()
        foreign = 0
        reads = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            names = draw.sample(range(300), 6)
            items = [item_of(name, length_of(name)) for name in names]
            want = [bytes(item.parts[0]) for item in items]
            if draw.random() < 0.4:
                done = backend.put(items)
                mine.update(n for n, s in zip(names, done, strict=True) if s is OK)
            else:
                for item in items:
                    item.parts[0][:] = bytes(len(item.parts[0]))
                for name, item, right, status in zip(
                    names, items, want, backend.get(items), strict=True
                ):
                    assert status in (OK, Status.MISS), f"{status} of {name}"
                    if status is OK:
                        assert bytes(item.parts[0]) == right, "wrong page served"
                        reads += 1
                        foreign += name not in mine
            assert disk_bytes(path) <= SIZE_BYTES, "bound exceeded"
        counts[me * 16 : me * 16 + 8] = reads.to_bytes(8, "little")
        counts[me * 16 + 8 : me * 16 + 16] = foreign.to_bytes(8, "little")
        backend.close()

    pids = [fork(lambda me=me: work(me)) for me in range(num_processes)]
    failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
    numbers = [
        int.from_bytes(counts[i * 8 : i * 8 + 8], "little") for i in range(num_processes * 2)
    ]
    return {
        "failed": failed,
        "reads": sum(numbers[0::2]),
        "foreign_reads": sum(numbers[1::2]),
        "fewest_foreign_reads": min(numbers[1::2]),
    }


def main(argv: Sequence[str]) -> None:
    mode, path, seed = argv[0], argv[1], int(argv[2])
    Path(path).mkdir(parents=True, exist_ok=True)
    if mode == "kill":
        result = kill_loop(path, seed, int(argv[3]))
    else:
        result = share_loop(path, seed, int(argv[3]), float(argv[4]))
    assert "torch" not in sys.modules, "the store needs torch"
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
