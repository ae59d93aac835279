"""Memory that ranks of one machine share, with a doorbell between any two, as descriptors to pass.

Plain numbers, so a seat travels as JSON; a process that inherits the descriptors under the same
numbers takes its place.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from phloem.groups.bells import check_machine, make_bells

__all__ = ["Seat", "make_seats"]

SeatT = TypeVar("SeatT", bound="Seat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank's place: pass `fds` to its process, then `close`."""

    rank: int
    size: int
    memory: int
    bells: tuple[int, ...]

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.memory, *(fd for fd in self.bells if fd >= 0))

    def open_memory(self) -> mmap.mmap:
        """Map all of it; the descriptor is given back, the doorbells' stay with the caller."""
        check_machine()
        mapping = mmap.mmap(self.memory, 0)
        os.close(self.memory)
        return mapping

    def close(self) -> None:
        """Close this process's copies: a peer counts as gone only when nobody holds its end."""
        for fd in self.fds:
            os.close(fd)


def make_seats(make: Callable[..., SeatT], size: int, num_bytes: int) -> list[SeatT]:
    """One seat per rank, each `make(rank=, size=, memory=, bells=)`; the memory is all zero.

    The caller owns their descriptors until they are passed on. No name refers to the memory.
    """
    check_machine()
    memory = os.memfd_create("phloem-ranks", os.MFD_CLOEXEC)
    os.ftruncate(memory, num_bytes)
    seats = [
        make(rank=rank, size=size, memory=os.dup(memory), bells=bells)
        for rank, bells in enumerate(make_bells(size))
    ]
    os.close(memory)
    return seats
