"""The agent trace: recorded sessions of a coding agent, played against a pool that is too small.

The trace is cut into as many parts as there are rounds; both sides play part k before either plays
part k + 1, each with the cache that the parts before have left. A fixed number of clients take the
next request of the trace whose session is not being answered.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phloem.bench.client import Answer
from phloem.bench.compare.tasks import Probe
from phloem.bench.workloads import Shape, Turn, make_sessions

__all__ = ["TRACE_CLIENTS", "AgentTrace", "PartReport", "load_trace", "play"]

TRACE_CLIENTS = 4
_PAGE_TOKENS = 16
_LONGEST_ANSWER = 64


@dataclass(frozen=True, slots=True)
class AgentTrace:
    """Requests in the order of the trace, cut into parts. Its first page names a session."""

    parts: tuple[tuple[Turn, ...], ...]

    @property
    def distinct_tokens(self) -> int:
        """What a pool would have to hold to compute nothing twice."""
        pages = {piece.key for part in self.parts for turn in part for piece in turn.pieces}
        return len(pages) * _PAGE_TOKENS

    @property
    def longest_tokens(self) -> int:
        """The longest prompt with its answer."""
        turns = [turn for part in self.parts for turn in part]
        return max(_length(turn) + turn.max_tokens for turn in turns)

    @property
    def num_requests(self) -> int:
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """One part on one server."""

    ttft_s: tuple[float, ...]  # in the order of the trace
    seconds: float
    tokens: int  # prompts and answers
    cached_tokens: int | None  # None: the server does not report it


def load_trace(path: Path, *, requests: int, parts: int, seed: int) -> AgentTrace:
    """The first `requests` of a trace file. Raises ConfigError for a file that is none."""
    shape = Shape(
        requests=requests,
        max_tokens=_LONGEST_ANSWER,
        prefix_tokens=0,
        unique_tokens=0,
        groups=1,
        turns=1,
        seed=seed,
        trace=path,
    )
    turns = [session.turns[0] for session in make_sessions("trace", shape)]
    count = max(1, min(parts, len(turns)))
    cuts = [len(turns) * i // count for i in range(count + 1)]
    return AgentTrace(tuple(tuple(turns[a:b]) for a, b in itertools.pairwise(cuts)))


async def play(probe: Probe, part: Sequence[Turn], clients: int = TRACE_CLIENTS) -> PartReport:
    """All requests of a part. Raises ServerFailed if one of them fails."""
    queue = _Queue(part)
    answers: list[Answer | None] = [None] * len(part)

    async def one_client() -> None:
        while (index := await queue.take()) is not None:
            turn = part[index]
            prompt = [id_ for piece in turn.pieces for id_ in piece.ids()]
            answers[index] = await probe.ask(prompt, turn.max_tokens)
            await queue.done(index)

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(part))):
            group.create_task(one_client())
    seconds = time.monotonic() - began
    done = [answer for answer in answers if answer is not None]
    cached = [answer.usage.cached_tokens for answer in done]
    known = [count for count in cached if count is not None]
    return PartReport(
        ttft_s=tuple(answer.ttft_s for answer in done),
        seconds=seconds,
        tokens=sum(_length(turn) + turn.max_tokens for turn in part),
        cached_tokens=sum(known) if len(known) == len(cached) else None,
    )


class _Queue:
    """Gives out requests in order, one of a session at a time."""

    def __init__(self, part: Sequence[Turn]) -> None:
        self._sessions = [turn.pieces[0].key for turn in part]
        self._left = list(range(len(part)))
        self._busy: set[str] = set()
        self._changed = asyncio.Condition()

    async def take(self) -> int | None:
        """The next request whose session is free; None at the end."""
        async with self._changed:
            while self._left:
                for index in self._left:
                    if self._sessions[index] not in self._busy:
                        self._left.remove(index)
                        self._busy.add(self._sessions[index])
                        return index
                await self._changed.wait()
        return None

    async def done(self, index: int) -> None:
        async with self._changed:
            self._busy.remove(self._sessions[index])
            self._changed.notify_all()


def _length(turn: Turn) -> int:
    return sum(piece.num_tokens for piece in turn.pieces)
