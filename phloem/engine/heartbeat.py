"""The engine's heartbeat: a page of memory that both processes map.

One process writes, others read at any time without asking anybody, so health is answered at once
also while a step takes seconds. Five aligned 8-byte words, each with one writing thread:

    word 0  passes of the loop          (loop thread)
    word 1  layers computed             (worker thread)
    word 2  nanoseconds, last pass      (loop thread; CLOCK_MONOTONIC, one epoch per machine)
    word 3  nanoseconds, last layer     (worker thread)
    word 4  state                       (loop thread)
"""

from __future__ import annotations

import enum
import mmap
import os
import sys
import tempfile
import time

__all__ = ["Heartbeat", "LoopState", "Pulse"]

_SIZE = mmap.PAGESIZE
_PASSES, _LAYERS, _PASS_NS, _LAYER_NS, _STATE = range(5)


class LoopState(enum.IntEnum):
    """What the engine's loop is doing."""

    LOADING = 0
    IDLE = 1  # loaded; waiting for a message
    BUSY = 2
    DEAD = 3


class Pulse:
    """One reading. `progress` grows with every pass and as layers are computed."""

    __slots__ = ("last_s", "progress", "state")

    def __init__(self, progress: int, last_s: float, state: LoopState) -> None:
        self.progress = progress
        self.last_s = last_s
        self.state = state


def _anonymous_file() -> int:
    """A descriptor of memory that another process can map and that no name refers to."""
    if sys.platform == "linux":
        return os.memfd_create("phloem-heartbeat")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Heartbeat:
    """A mapping of the shared page. Its creator owns `fd`, and whoever maps it closes its own."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self._bytes = memoryview(self._map)
        # A cast view stores a word with one aligned move: a reader never sees half of it.
        self._words = self._bytes.cast("Q")

    @classmethod
    def create(cls) -> Heartbeat:
        fd = _anonymous_file()
        os.ftruncate(fd, _SIZE)
        heartbeat = cls(fd)
        heartbeat.beat(LoopState.LOADING)
        return heartbeat

    def beat(self, state: LoopState) -> None:
        """The loop has made a pass and is now in `state`."""
        words = self._words
        words[_PASSES] += 1
        words[_PASS_NS] = time.monotonic_ns()
        words[_STATE] = state

    def beat_layer(self) -> None:
        """The worker has computed one more layer."""
        words = self._words
        words[_LAYERS] += 1
        words[_LAYER_NS] = time.monotonic_ns()

    def read(self) -> Pulse:
        words = self._words
        last_ns = max(words[_PASS_NS], words[_LAYER_NS])
        return Pulse(words[_PASSES] + words[_LAYERS], last_ns / 1e9, LoopState(words[_STATE]))

    def close(self) -> None:
        """Unmap and close. Idempotent."""
        if self.fd >= 0:
            self._words.release()
            self._bytes.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1
