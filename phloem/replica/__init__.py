"""The command log: every change of the cache is a command, applied in one order on every rank."""

from __future__ import annotations

from phloem.replica.allocator import PageAllocator
from phloem.replica.commands import (
    Alloc,
    Append,
    Command,
    Detach,
    Evict,
    Free,
    Insert,
    Lock,
    Merge,
    Split,
    Unlock,
)
from phloem.replica.log import CommandLog, ReplicatedState

__all__ = [
    "Alloc",
    "Append",
    "Command",
    "CommandLog",
    "Detach",
    "Evict",
    "Free",
    "Insert",
    "Lock",
    "Merge",
    "PageAllocator",
    "ReplicatedState",
    "Split",
    "Unlock",
]
