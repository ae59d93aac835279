"""A group of processes on one machine, through shared memory.

    begin   writes what fits into this rank's free slots, on the caller's thread
    finish  reads what the others have written, and sleeps while there is nothing

What may hold others up is moved by a thread of the group, so that it goes on while the caller
computes: bytes that do not fit into the free slots, and reads that a sender's slots may wait for.
It sleeps otherwise. Copies are plain `memmove` outside the interpreter's lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from phloem.core.errors import GroupError
from phloem.groups.base import DEFAULT_TIMEOUT_S, BaseGroup, Exchange
from phloem.groups.bells import Bells
from phloem.groups.seats import Seat, make_seats
from phloem.groups.shm_job import Job
from phloem.groups.shm_ring import CHUNK_BYTES, NUM_SLOTS, Ring

__all__ = ["GroupSeat", "ShmGroup", "shm_seats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSeat(Seat):
    """One rank's place in a group. `members`: as `BaseGroup` takes them."""

    axis: str
    timeout_s: float
    chunk_bytes: int
    members: tuple[int, ...] = ()


def shm_seats(
    size: int,
    *,
    axis: str = "cp",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    chunk_bytes: int = CHUNK_BYTES,
    members: Sequence[int] = (),
) -> list[GroupSeat]:
    """One seat per rank. The caller owns their descriptors until they are passed on."""
    if chunk_bytes < 64 * size or chunk_bytes % 64:
        raise ValueError(f"chunk_bytes must be a multiple of 64, and at least {64 * size}")
    make = partial(
        GroupSeat,
        axis=axis,
        timeout_s=timeout_s,
        chunk_bytes=chunk_bytes,
        members=tuple(members),
    )
    return make_seats(make, size, Ring.file_bytes(size, chunk_bytes))


class ShmGroup(BaseGroup):
    """One rank's end. Takes over the descriptors of its seat."""

    def __init__(self, seat: GroupSeat) -> None:
        super().__init__(
            rank=seat.rank,
            size=seat.size,
            axis=seat.axis,
            timeout_s=seat.timeout_s,
            members=seat.members,
        )
        self._ring = Ring(
            seat.open_memory(), rank=seat.rank, size=seat.size, chunk_bytes=seat.chunk_bytes
        )
        self._bells = Bells(seat.rank, seat.bells, self._ring.sleeping)
        self._state = threading.Condition()  # guards all below, and the ring's counters
        self._writes: list[Job] = []  # oldest first, as in reads
        self._reads: list[Job] = []
        self._jobs: dict[int, Job] = {}
        self._moving = False  # the mover works: nobody else sleeps on the bells
        self._broken: GroupError | None = None  # found by the mover, raised by the caller
        self._closing = False
        self._kick = threading.Semaphore(0)
        self._mover: threading.Thread | None = None

    def _check_tensor(self, tensor: Tensor) -> None:
        super()._check_tensor(tensor)
        if tensor.device.type != "cpu":
            raise ValueError(f"a group over shared memory cannot move a {tensor.device} tensor")

    def _launch(self, exchange: Exchange) -> None:
        with self._state:
            if self._closing:
                raise self.error("this group is closed", (self.rank,))
            job = Job(exchange, self._ring)
            self._ring.note(exchange.serial, exchange.digest)
            self._jobs[exchange.serial] = job
            self._writes.append(job)
            self._reads.append(job)
            try:
                self._pump()
            except GroupError as error:  # finish says so
                self._broken = error
            if not self._moving and not self._broken and self._holds_up(job):
                self._moving = True
                self._start_mover()

    def _complete(self, exchange: Exchange, deadline_s: float) -> None:
        with self._state:
            job = self._jobs[exchange.serial]
            while not job.is_done:
                if self._broken is not None:
                    raise self._broken
                if self._pump():
                    continue
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise self.late(exchange, self._missing(), gone=False)
                if self._moving:
                    self._state.wait(left_s)
                else:
                    self._check_gone()
                    self._bells.sleep(self._can_move, left_s)
            del self._jobs[exchange.serial]
            if self._moving and not (self._writes or self._reads):
                self._bells.wake()  # the mover has nothing left to sleep for

    def _digest_of(self, rank: int, serial: int) -> int | None:
        return self._ring.digest_of(rank, serial)

    # -- moving; under _state

    def _pump(self) -> bool:
        """Write and read what can be, without waiting. True if anything moved."""
        moved = False
        while self._write() or self._read():
            moved = True
        return moved

    def _write(self) -> bool:
        if not self._writes or not self._ring.may_write():
            return False
        job = self._writes[0]
        if job.write_chunk():
            self._bells.ring()
        if job.is_written:
            self._writes.pop(0)
        return True

    def _read(self) -> bool:
        if not self._reads:
            return False
        job = self._reads[0]
        moved = False
        for source in job.open_sources():
            if self._ring.has(source):
                if not job.read_chunk(source):
                    serial = min(job.exchange.serial, self._ring.head(source).serial)
                    raise self.mismatch(source, serial)
                moved = True
        if moved:
            self._bells.ring()
        if job.is_read:
            self._reads.pop(0)
            moved = True
        return moved

    def _holds_up(self, job: Job) -> bool:
        """Whether a peer may wait for what is left here, if nobody goes on before `finish`."""
        if self._writes:
            return True
        return len(self._reads) > NUM_SLOTS or (job.is_long and not job.is_read)

    def _can_move(self) -> bool:
        """A look without the lock: may be wrong, then the next pump moves nothing."""
        if self._closing or (self._writes and self._ring.may_write()):
            return True
        return any(self._ring.has(s) for job in self._reads[:1] for s in job.open_sources())

    def _missing(self) -> tuple[int, ...]:
        """Whom the oldest operation waits for."""
        if self._reads and (sources := self._reads[0].open_sources()):
            return tuple(sources)
        return self._ring.slowest()

    def _check_gone(self) -> None:
        """Raise if somebody is waited for who will never come."""
        waited = set(self._missing() if self._reads else ())
        if self._writes:
            waited |= set(self._ring.slowest())
        dead = tuple(sorted(waited & self._bells.gone))
        # What it wrote before it went is still there, and comes first.
        if dead and not self._can_move():
            job = (self._reads or self._writes)[0]
            raise self.late(job.exchange, dead, gone=True)

    # -- the mover

    def _start_mover(self) -> None:
        if self._mover is None:
            name = f"phloem-{self.axis}{self.rank}-mover"
            self._mover = threading.Thread(target=self._move, name=name, daemon=True)
            self._mover.start()
        self._kick.release()

    def _move(self) -> None:
        while True:
            self._kick.acquire()
            if self._closing:
                return
            try:
                while self._move_on():
                    self._bells.sleep(self._can_move, self.timeout_s)
            except GroupError as error:
                with self._state:
                    self._broken = error
                    self._moving = False
                    self._state.notify_all()

    def _move_on(self) -> bool:
        """One pass. False when there is nothing left to wait for."""
        with self._state:
            if not self._closing:
                if self._pump():
                    self._state.notify_all()
                self._check_gone()
            if self._closing or not (self._writes or self._reads):
                self._moving = False
                self._state.notify_all()
            return self._moving

    def close(self) -> None:
        with self._state:
            if self._closing:
                return
            self._closing = True
        if self._mover is not None:
            self._kick.release()
            self._bells.wake()
            self._mover.join()
        self._bells.close()
        self._ring.close()
