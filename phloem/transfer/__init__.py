"""Movers: pages between device pool, host arena and storage, on threads of their own."""

from __future__ import annotations

from phloem.transfer.component import ComponentMemory, memory_of
from phloem.transfer.copier import make_copier
from phloem.transfer.engine import TransferEngine, TransferHooks

__all__ = ["ComponentMemory", "TransferEngine", "TransferHooks", "make_copier", "memory_of"]
