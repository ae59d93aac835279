"""Hits of a recorded trace with a small pool of window pages, against one without limit.

Prompts of 16 agent sessions, one after another; a window of 256 tokens, pages of 16, 384 of them
for windows: room for 24 tails. The full component has room for everything. No restart goes below a
valid length (the model is taken to have more window layers than that would pay for), so every hit
is one of window state that was kept.

`tombstone_only` is what engines do that evict windows page by page, the least recently used first,
and know no tails: one page of a tail that goes makes all of them useless.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from phloem.bench.tree import find_trace
from phloem.cache import WindowConfig
from phloem.cache.window_eviction import Tails
from phloem.loop import EngineLoop
from phloem.sim import pages_of, read_trace, replay, simulated_target
from phloem.sim.replay import Emit, LoopFactory

__all__ = ["WINDOW_PAGES", "hit_rates"]

TRACE = "claude_code_16sessions.jsonl"
PAGE_SIZE = 16
WINDOW_TOKENS = 256
WINDOW_PAGES = 384
NO_RESTARTS = 1 << 20  # window layers: a restart would have to begin before the prompt


class _NoTails(Tails):
    """Keeps nothing in particular: all pages are leftovers, in order of their last use."""

    __slots__ = ()

    def want(self, *args: Any, **kwargs: Any) -> None:
        """Nobody prefers any page to another one."""


def hit_rates(path: Path | None = None) -> dict[str, float] | None:
    """By name: unlimited, kept (384 pages), tombstone_only (384 pages). None without the trace."""
    path = find_trace(TRACE) if path is None else path
    if path is None:
        return None
    trace = list(read_trace(path))
    num_pages = pages_of(trace, max_tokens=1, page_size=PAGE_SIZE)

    def rate(window_pages: int, *, tails: bool = True) -> float:
        window = WindowConfig(tokens=WINDOW_TOKENS, layers=NO_RESTARTS, pages=(window_pages,))
        target = simulated_target(num_pages=num_pages, page_size=PAGE_SIZE, window=window)
        if not tails:
            target = replace(target, make_loop=partial(_without_tails, target.make_loop))
        return replay(trace, page_size=PAGE_SIZE, target=target).hit_rate

    return {
        "unlimited": rate(num_pages),
        "kept": rate(WINDOW_PAGES),
        "tombstone_only": rate(WINDOW_PAGES, tails=False),
    }


def _without_tails(make_loop: LoopFactory, emit: Emit) -> EngineLoop:
    loop = make_loop(emit)
    ledger = loop.scheduler.cache.leader.window
    assert ledger is not None, "the cache has windows"
    ledger.tails = _NoTails(ledger.state)
    return loop
