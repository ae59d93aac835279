"""Time, injected: real in a server, virtual in tests and in the simulator."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "MonotonicClock", "VirtualClock"]


class Clock(Protocol):
    """A source of seconds that never runs backwards."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start."""
        ...


class MonotonicClock:
    """The machine's monotonic clock (on Linux one epoch for all processes)."""

    def now_s(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that stands still until told to advance."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (>= 0)."""
        assert seconds >= 0, f"a clock cannot run backwards ({seconds} s)"
        self._now_s += seconds
