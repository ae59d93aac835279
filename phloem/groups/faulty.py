"""A group that behaves badly, from a seed: begins late, loses the core, and leaves in mid-work."""

from __future__ import annotations

import os
import random

from phloem.core.errors import GroupError
from phloem.groups.base import BaseGroup, Exchange

__all__ = ["FaultyGroup"]

_MOST_YIELDS = 50


class FaultyGroup(BaseGroup):
    """Another group's twin; takes it over.

    Some operations start only when one is finished that was begun with or after them, as if this
    rank had come late (order is kept), and before some the core is given away. After
    `leave_after` operations the rank leaves: its own next call raises, its peers see it gone.
    """

    def __init__(self, group: BaseGroup, *, seed: int, leave_after: int | None = None) -> None:
        super().__init__(
            rank=group.rank, size=group.size, axis=group.axis, timeout_s=group.timeout_s
        )
        self._inner = group
        self._random = random.Random(seed)
        self._leave_after = leave_after
        self._held: list[Exchange] = []

    def _launch(self, exchange: Exchange) -> None:
        if self._leave_after is not None and exchange.serial >= self._leave_after:
            self.close()
            raise self._fail(GroupError(f"rank {self.rank} leaves", ranks=(self.rank,)))
        self._held.append(exchange)
        if self._random.random() < 0.5:
            self._release()

    def _release(self) -> None:
        for exchange in self._held:
            for _ in range(self._random.randrange(_MOST_YIELDS)):
                os.sched_yield()
            self._inner._launch(exchange)  # noqa: SLF001 - a twin: the same class on the inside
        self._held.clear()

    def _complete(self, exchange: Exchange, deadline_s: float) -> None:
        self._release()
        self._inner._complete(exchange, deadline_s)  # noqa: SLF001

    def _digest_of(self, rank: int, serial: int) -> int | None:
        return self._inner._digest_of(rank, serial)  # noqa: SLF001

    def close(self) -> None:
        self._held.clear()
        self._inner.close()
