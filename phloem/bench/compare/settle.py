"""Between two samples the servers come to rest, or one is measured while the other still works.

vLLM's CPU build keeps one core busy for a while after each answer (measured: 0.93 to 0.99 CPU
seconds in the second after it, 0.01 when idle), which is half of a machine with two cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from phloem.bench.compare.process import process_tree

__all__ = ["cpu_seconds", "until_idle"]

_WINDOW_S = 0.5
_IDLE_SHARE = 0.1  # of one core
_LIMIT_S = 20.0


async def until_idle(
    used: Callable[[], float], pause: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> bool:
    """Wait until the CPU seconds that `used` tells hardly grow; False if they grow to the end."""
    before = used()
    for _ in range(int(_LIMIT_S / _WINDOW_S)):
        await pause(_WINDOW_S)
        now = used()
        if now - before <= _IDLE_SHARE * _WINDOW_S:
            return True
        before = now
    return False


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of these processes and all that descend from them, as far as they still run."""
    ticks = 0
    for one in {child for pid in pids for child in process_tree(pid)}:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
