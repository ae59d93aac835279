"""A group over a simulated link: what a rank receives takes time by the byte."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from phloem.groups.base import BaseGroup, Exchange

__all__ = ["Link", "LinkedGroup"]


@dataclass(slots=True)
class Link:
    """One line into each rank, first come, first served. May be changed between two operations.

    `carried`: bytes that have come to each rank.
    """

    latency_s: float = 0.0
    bytes_s: float = math.inf
    carried: Counter[int] = field(default_factory=Counter)

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_s if num_bytes else 0.0


class LinkedGroup(BaseGroup):
    """Another group's twin; takes it over.

    An operation is complete when what it receives would have come over the link, and not before it
    is complete on the inside. The line is busy from when this rank begins; waiting is sleep.
    """

    def __init__(
        self,
        group: BaseGroup,
        link: Link,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(
            rank=group.rank,
            size=group.size,
            axis=group.axis,
            timeout_s=group.timeout_s,
            members=group.members,
        )
        self._inner, self._link, self._now, self._sleep = group, link, now, sleep
        self._free_s = 0.0
        self._due_s: dict[int, float] = {}  # by the operation's number

    def _launch(self, exchange: Exchange) -> None:
        others = (recv for rank, recv in enumerate(exchange.recvs) if rank != self.rank)
        num_bytes = sum(recv.nbytes for recv in others if recv is not None)
        self._link.carried[self.rank] += num_bytes
        self._free_s = max(self._now(), self._free_s) + self._link.seconds(num_bytes)
        self._due_s[exchange.serial] = self._free_s
        self._inner._launch(exchange)  # noqa: SLF001 - a twin: the same class on the inside

    def _complete(self, exchange: Exchange, deadline_s: float) -> None:
        self._inner._complete(exchange, deadline_s)  # noqa: SLF001
        left_s = self._due_s.pop(exchange.serial, 0.0) - self._now()
        if left_s > 0:
            self._sleep(left_s)

    def _digest_of(self, rank: int, serial: int) -> int | None:
        return self._inner._digest_of(rank, serial)  # noqa: SLF001

    def close(self) -> None:
        self._inner.close()
