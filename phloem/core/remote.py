"""How a rank attends over pages that other ranks own, and what the ways are chosen by."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

__all__ = ["IN_PLACE", "LinkRates", "Remote", "RemoteWays"]


class Remote(enum.Enum):
    """A way of reading remote pages.

    DIRECT: peers' pools are mapped memory, and are read in place.
    GATHER_KV: the owners' pages travel to whoever attends.
    SEND_Q: the queries travel to the owners, partial results travel back and are merged.
    """

    DIRECT = "direct"
    GATHER_KV = "gather_kv"
    SEND_Q = "send_q"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteWays:
    """A field of the step plan: one way for each part of what a rank reads of others.

    `own`: pages into which the step itself writes, whosever tokens are in them; `cached`: all
    others, which were there before it.
    """

    cached: Remote = Remote.DIRECT
    own: Remote = Remote.DIRECT

    @classmethod
    def all(cls, way: Remote) -> RemoteWays:
        """The same way for both parts."""
        return cls(cached=way, own=way)

    @property
    def exchanges(self) -> bool:
        """Whether anything travels: then every rank takes part in every layer."""
        return not (self.cached is Remote.DIRECT and self.own is Remote.DIRECT)

    def takes(self, way: Remote) -> bool:
        """Whether some part goes this way."""
        return way in (self.cached, self.own)

    def __str__(self) -> str:
        if self.cached is self.own:
            return self.own.value
        return f"cached {self.cached.value}, own {self.own.value}"


IN_PLACE = RemoteWays()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """What was measured at the start: between two ranks, and of one rank's arithmetic.

    `latency_s`: what a message costs beside its bytes, with all that the software does around it.
    `read_bytes_s`: of remote memory read in place, 0 where it is not mapped; `memory_bytes_s`: of
    this rank's own. `linear_row_s`: a layer's products for one row; `pair_s`: attention of one
    query over one key.
    """

    latency_s: float
    bytes_s: float
    linear_row_s: float
    pair_s: float
    read_bytes_s: float = 0.0
    memory_bytes_s: float = math.inf

    def message(self, num_bytes: float) -> float:
        """Seconds of one message; nothing is sent where there are no bytes."""
        return self.latency_s + num_bytes / self.bytes_s if num_bytes else 0.0
