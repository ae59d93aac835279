"""Movers: pages between device pool, host arena and storage, on threads of their own."""

from __future__ import annotations

from phloem.transfer.apart import APART_CHUNK_BYTES, Holder, LeaderGate, tell_loads
from phloem.transfer.component import ComponentMemory, memory_of
from phloem.transfer.copier import make_copier
from phloem.transfer.engine import TransferEngine, TransferHooks
from phloem.transfer.page_link import PageLink
from phloem.transfer.page_server import PageServer

__all__ = [
    "APART_CHUNK_BYTES",
    "ComponentMemory",
    "Holder",
    "LeaderGate",
    "PageLink",
    "PageServer",
    "TransferEngine",
    "TransferHooks",
    "make_copier",
    "memory_of",
    "tell_loads",
]
