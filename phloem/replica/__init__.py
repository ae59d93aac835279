"""The command log: every change of the cache is a command, applied in one order on every rank."""

from __future__ import annotations

from phloem.replica import commands, window_commands
from phloem.replica.allocator import PageAllocator, give_back
from phloem.replica.commands import Command
from phloem.replica.host_pool import HostPool
from phloem.replica.log import CommandLog, ReplicatedState
from phloem.replica.records import RecordReader, RecordWriter

__all__ = [
    "Command",
    "CommandLog",
    "HostPool",
    "PageAllocator",
    "RecordReader",
    "RecordWriter",
    "ReplicatedState",
    "commands",
    "give_back",
    "window_commands",
]
