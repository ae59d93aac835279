"""How far each rank is, in shared memory: readers of a peer's pages wait for its writes here.

One word per rank, written by it alone: step and layer packed so that later is larger. The rank
writes pages first and the word after; x86-64 shows both in that order.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass

from phloem.core.errors import GroupError
from phloem.groups.bells import Bells, check_machine, make_bells

__all__ = ["Progress", "ProgressSeat", "progress_seats"]

_LAYER_BITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSeat:
    """One rank's place at the board, as descriptors: pass `fds` to its process, then `close`."""

    rank: int
    size: int
    memory: int
    bells: tuple[int, ...]

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.memory, *(fd for fd in self.bells if fd >= 0))

    def close(self) -> None:
        """Close this process's copies."""
        for fd in self.fds:
            os.close(fd)


def progress_seats(size: int) -> list[ProgressSeat]:
    """One seat per rank. The caller owns their descriptors until they are passed on."""
    check_machine()
    memory = os.memfd_create("phloem-progress", os.MFD_CLOEXEC)
    os.ftruncate(memory, mmap.PAGESIZE)
    seats = [
        ProgressSeat(rank=rank, size=size, memory=os.dup(memory), bells=bells)
        for rank, bells in enumerate(make_bells(size))
    ]
    os.close(memory)
    return seats


class Progress:
    """One rank's end. Takes over the descriptors of its seat. One thread at a time waits."""

    def __init__(self, seat: ProgressSeat) -> None:
        check_machine()
        self.rank = seat.rank
        self.size = seat.size
        self._map = mmap.mmap(seat.memory, mmap.PAGESIZE)
        os.close(seat.memory)
        self._view = memoryview(self._map)
        self._words = self._view.cast("Q")
        self._at = self._words[: seat.size]
        self._sleeping = self._words[seat.size : 2 * seat.size]
        self._bells = Bells(seat.rank, seat.bells, self._sleeping)

    def post(self, step: int, layer: int) -> None:
        """This rank has written all that `layer` of `step` writes. Never backwards."""
        word = _packed(step, layer)
        assert word >= self._at[self.rank], f"progress ran back to step {step}, layer {layer}"
        self._at[self.rank] = word
        self._bells.ring()

    def read(self, rank: int) -> tuple[int, int] | None:
        """(step, layer) that a rank has posted last; None before its first."""
        word = self._at[rank]
        return None if word == 0 else ((word - 1) >> _LAYER_BITS, (word - 1) % (1 << _LAYER_BITS))

    def wait_for(self, rank: int, step: int, layer: int, timeout_s: float) -> None:
        """Return when `rank` has posted this or anything later. Raises GroupError if it will not.

        What a rank posted before it went still counts.
        """
        wanted = _packed(step, layer)
        deadline_s = time.monotonic() + timeout_s
        while self._at[rank] < wanted:
            left_s = deadline_s - time.monotonic()
            gone = rank in self._bells.gone
            if gone or left_s <= 0:
                why = "gone" if gone else "late"
                text = f"rank {rank} is {why}: waited for step {step}, layer {layer}"
                raise GroupError(f"{text}; it posted {self.read(rank)}", ranks=(rank,))
            self._bells.sleep(lambda: self._at[rank] >= wanted, left_s)

    def close(self) -> None:
        """Unmap; peers that wait for this rank are told. Idempotent."""
        if self._map.closed:
            return
        self._bells.close()
        for view in (self._at, self._sleeping, self._words, self._view):
            view.release()
        self._map.close()


def _packed(step: int, layer: int) -> int:
    assert step >= 0, f"step {step}"
    assert 0 <= layer < 1 << _LAYER_BITS, f"layer {layer}"
    return (step << _LAYER_BITS | layer) + 1
