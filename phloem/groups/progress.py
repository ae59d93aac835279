"""How far each rank is: readers of a peer's pages wait for its writes here.

One word per rank, written by it alone: step and layer packed so that later is larger. The rank
writes pages first and the word after. Ranks are processes (`ShmProgress`: words in shared memory,
which x86-64 shows in the order in which they were written) or threads of one (`LocalProgress`).
"""

from __future__ import annotations

import abc
import mmap
import threading
import time
from collections.abc import Callable

from phloem.core.errors import GroupError
from phloem.groups.bells import Bells
from phloem.groups.seats import Seat, make_seats

__all__ = [
    "LAST_LAYER",
    "LocalProgress",
    "Progress",
    "ShmProgress",
    "local_progress",
    "progress_seats",
]

_LAYER_BITS = 16
LAST_LAYER = (1 << _LAYER_BITS) - 1  # of no model: a step that is over


# A waiter looks so often whether the rank that it waits for moves at all.
_LOOK_S = 1.0


def _nothing() -> None:
    return None


class Progress(abc.ABC):
    """One rank's end. One thread at a time waits.

    `on_move` is called now and then while a rank that is waited for goes on.
    """

    rank: int
    size: int
    on_move: Callable[[], None] = staticmethod(_nothing)
    _at: list[int] | memoryview[int]  # the words, by rank

    def post(self, step: int, layer: int) -> None:
        """This rank has written all that `layer` of `step` writes. Never backwards."""
        word = _packed(step, layer)
        assert word >= self._at[self.rank], f"progress ran back to step {step}, layer {layer}"
        self._publish(word)

    def read(self, rank: int) -> tuple[int, int] | None:
        """(step, layer) that a rank has posted last; None before its first."""
        word = self._at[rank]
        return None if word == 0 else ((word - 1) >> _LAYER_BITS, (word - 1) % (1 << _LAYER_BITS))

    def wait_for(self, rank: int, step: int, layer: int, patience_s: float) -> None:
        """Return when `rank` has posted this or anything later. Raises GroupError if it will not.

        What a rank posted before it went still counts. It is late when it has posted nothing for
        `patience_s`.
        """
        wanted = _packed(step, layer)
        seen = self._at[rank]
        deadline_s = time.monotonic() + patience_s
        while (word := self._at[rank]) < wanted:
            now_s = time.monotonic()
            if word != seen:
                seen, deadline_s = word, now_s + patience_s
                self.on_move()
            # Asked before the look: what it posted on its way out is seen.
            gone = self._is_gone(rank)
            if self._at[rank] < wanted and (gone or now_s >= deadline_s):
                why = "gone" if gone else "late"
                text = f"rank {rank} is {why}: waited for {_name(step, layer)}"
                raise GroupError(f"{text}; it posted {self.read(rank)}", ranks=(rank,))
            self._sleep(rank, wanted, min(deadline_s - now_s, _LOOK_S))

    @abc.abstractmethod
    def close(self) -> None:
        """Leave: peers that wait for this rank are told. Idempotent."""

    @abc.abstractmethod
    def _publish(self, word: int) -> None: ...

    @abc.abstractmethod
    def _is_gone(self, rank: int) -> bool: ...

    @abc.abstractmethod
    def _sleep(self, rank: int, wanted: int, timeout_s: float) -> None:
        """Return when the rank's word may have become `wanted`, when a rank has gone, or later."""


def _packed(step: int, layer: int) -> int:
    assert step >= 0, f"step {step}"
    assert 0 <= layer <= LAST_LAYER, f"layer {layer}"
    return (step << _LAYER_BITS | layer) + 1


def _name(step: int, layer: int) -> str:
    return f"the end of step {step}" if layer == LAST_LAYER else f"step {step}, layer {layer}"


# -- processes


def progress_seats(size: int) -> list[Seat]:
    """One seat per rank. The caller owns their descriptors until they are passed on."""
    return make_seats(Seat, size, mmap.PAGESIZE)


class ShmProgress(Progress):
    """Of a process. Takes over the descriptors of its seat.

    A sleeper writes down whom it waits for and up to where, so that a rank that posts a layer wakes
    only those whose wait it ends.
    """

    def __init__(self, seat: Seat) -> None:
        self.rank = seat.rank
        self.size = size = seat.size
        self._map = seat.open_memory()
        self._view = memoryview(self._map)
        self._words = self._view.cast("Q")
        self._parts = [self._words[i * size : (i + 1) * size] for i in range(4)]
        self._at, self._sleeping, self._whom, self._wanted = self._parts
        self._bells = Bells(seat.rank, seat.bells, self._sleeping)

    def _publish(self, word: int) -> None:
        self._at[self.rank] = word
        self._bells.ring(self._waits)

    def _waits(self, peer: int) -> bool:
        """Whether a peer that sleeps does so for what has just been posted."""
        return self._whom[peer] == self.rank and self._wanted[peer] <= self._at[self.rank]

    def _is_gone(self, rank: int) -> bool:
        return rank in self._bells.gone

    def _sleep(self, rank: int, wanted: int, timeout_s: float) -> None:
        self._whom[self.rank] = rank
        self._wanted[self.rank] = wanted
        self._bells.sleep(lambda: self._at[rank] >= wanted, timeout_s)

    def close(self) -> None:
        """Unmap; peers that wait for this rank are told. Idempotent. Not while a thread waits."""
        if self._map.closed:
            return
        self._bells.close()
        for view in (*self._parts, self._words, self._view):
            view.release()
        self._map.close()


# -- threads


class _Board:
    """What the threads share, all of it under `changed`."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.at = [0] * size
        self.gone: set[int] = set()


class LocalProgress(Progress):
    """Of a thread. Made by `local_progress`."""

    def __init__(self, board: _Board, rank: int) -> None:
        self.rank = rank
        self.size = len(board.at)
        self._board = board
        self._at = board.at

    def _publish(self, word: int) -> None:
        with self._board.changed:
            self._at[self.rank] = word
            self._board.changed.notify_all()

    def _is_gone(self, rank: int) -> bool:
        return rank in self._board.gone

    def _sleep(self, rank: int, wanted: int, timeout_s: float) -> None:
        def over() -> bool:
            return self._at[rank] >= wanted or rank in self._board.gone

        with self._board.changed:
            self._board.changed.wait_for(over, timeout_s)

    def close(self) -> None:
        with self._board.changed:
            self._board.gone.add(self.rank)
            self._board.changed.notify_all()


def local_progress(size: int) -> list[LocalProgress]:
    """One end per rank, each for a thread of its own."""
    board = _Board(size)
    return [LocalProgress(board, rank) for rank in range(size)]
