"""How a rank attends over pages that other ranks own."""

from __future__ import annotations

import enum

__all__ = ["Remote"]


class Remote(enum.Enum):
    """A field of the step plan: one way for what is cached and for the chunk's own KV.

    DIRECT: peers' pools are mapped memory, and are read in place.
    GATHER_KV: the owners' pages travel to whoever attends.
    SEND_Q: the queries travel to the owners, partial results travel back and are merged.
    """

    DIRECT = "direct"
    GATHER_KV = "gather_kv"
    SEND_Q = "send_q"
