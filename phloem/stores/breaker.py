"""Circuit breaker: after some failures in a row stop asking, and find out when to ask again."""

from __future__ import annotations

import enum

__all__ = ["Breaker", "BreakerState"]


class BreakerState(enum.Enum):
    """CLOSED: asked as usual. OPEN: not asked. TRYING: one probe is under way."""

    CLOSED = "closed"
    OPEN = "open"
    TRYING = "trying"


class Breaker:
    """Opens after `threshold` failures in a row; tries again after a pause that doubles each time.

    The pause goes back to its shortest only when real work has succeeded: a backend that answers
    probes but fails reads is not asked again and again.
    """

    def __init__(
        self, *, threshold: int = 4, pause_s: float = 0.5, longest_pause_s: float = 30.0
    ) -> None:
        self.state = BreakerState.CLOSED
        self.num_opened = 0
        self._threshold = threshold
        self._shortest_s = pause_s
        self._longest_s = longest_pause_s
        self._pause_s = 0.0  # 0: the next pause is the shortest
        self._failures = 0
        self._opened_s = 0.0

    @property
    def allows(self) -> bool:
        """Whether ordinary work may be sent."""
        return self.state is BreakerState.CLOSED

    def wants_probe(self, now_s: float) -> bool:
        """Whether it is time to try; the caller then sends a probe and reports its outcome."""
        if self.state is not BreakerState.OPEN or now_s < self._opened_s + self._pause_s:
            return False
        self.state = BreakerState.TRYING
        return True

    def probed(self, alive: bool, now_s: float) -> None:
        """The outcome of the probe."""
        if alive:
            self.state = BreakerState.CLOSED
            self._failures = 0
        else:
            self._open(now_s)

    def succeeded(self) -> None:
        """Real work was done."""
        self._failures = 0
        if self.state is BreakerState.CLOSED:
            self._pause_s = 0.0

    def failed(self, now_s: float) -> None:
        """Real work failed."""
        self._failures += 1
        if self.state is BreakerState.CLOSED and self._failures >= self._threshold:
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        self._pause_s = min(2 * self._pause_s or self._shortest_s, self._longest_s)
        self.state = BreakerState.OPEN
        self.num_opened += 1
        self._opened_s = now_s
