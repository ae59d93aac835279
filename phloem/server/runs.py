"""Requests in flight: each one followed to a sure end.

An engine iterator that ends by itself is exhausted, never closed: closing it early means abort.
One that does not (client gone, abort asked for, server stopping) is closed at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from msgspec import structs

from phloem.core.errors import EngineDead
from phloem.core.request import FinishReason
from phloem.engine.api import EngineClient, TextChunk, TextLogprob, TextRequest
from phloem.server.errors import RequestFailed
from phloem.server.metrics import Metrics, Timer

__all__ = ["Runs", "collect", "merge"]

ChunkStream = AsyncGenerator[TextChunk, None]


class _Run:
    """One engine request."""

    def __init__(self, stream: ChunkStream, timer: Timer) -> None:
        self.stream = stream
        self.timer = timer
        self.last = TextChunk()
        self.aborted = False
        self._waiting: asyncio.Task[object] | None = None

    def abort(self) -> None:
        """End it with FinishReason.ABORT, at once if it waits for the engine."""
        self.aborted = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def next(self) -> TextChunk | None:
        """The next chunk; None at the end."""
        if self.aborted:
            return self._cut()
        self._waiting = asyncio.current_task()
        try:
            chunk = await anext(self.stream)
        except StopAsyncIteration:
            return None
        except asyncio.CancelledError:
            task = self._waiting
            # uncancel() > 0: somebody else cancelled us too, and that must go through.
            if not self.aborted or task is None or task.uncancel() > 0:
                raise
            return self._cut()
        finally:
            self._waiting = None
        if chunk.finish is FinishReason.ABORT:
            return self._cut()  # cut off by the engine: the totals so far are what counts
        self.last = chunk
        self.timer.tick(len(chunk.tokens))
        return chunk

    def _cut(self) -> TextChunk:
        cut = FinishReason.ABORT
        return structs.replace(self.last, text="", tokens=(), logprobs=(), finish=cut)


class Runs:
    """All requests in flight, by the id that the client knows (several may share one)."""

    def __init__(self, engine: EngineClient, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._runs: dict[str, list[_Run]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return sum(map(len, self._runs.values()))

    def abort(self, request_id: str) -> int:
        """Abort what runs under this id; returns how many did."""
        runs = self._runs.get(request_id, [])
        for run in runs:
            run.abort()
        return len(runs)

    async def follow(self, request: TextRequest) -> ChunkStream:
        """Chunks up to the one with `finish`. Raises as `EngineClient.generate`, RequestFailed.

        Close it (aclosing) in every case: that aborts what has not ended.
        """
        public = request.request_id
        if public in self._runs:  # ours are unique; a space occurs in no id of a client
            self._serial += 1
            request = replace(request, request_id=f"{public} {self._serial}")
        stream = cast(ChunkStream, self._engine.generate(request))
        run = _Run(stream, self._metrics.start_timer())
        self._runs.setdefault(public, []).append(run)
        try:
            while (chunk := await run.next()) is not None:
                if chunk.finish is FinishReason.ERROR:
                    raise RequestFailed(chunk.error or "the engine could not answer this request")
                if chunk.finish is not None:
                    if not run.aborted:
                        async for _ in stream:
                            pass
                    run.timer.finish()
                    yield chunk
                    return
                yield chunk
            raise EngineDead("an answer stopped before its end")
        finally:
            self._drop(public, run)
            await stream.aclose()

    def _drop(self, public: str, run: _Run) -> None:
        peers = self._runs[public]
        peers.remove(run)
        if not peers:
            del self._runs[public]


async def collect(source: ChunkStream) -> TextChunk:
    """The whole answer as one chunk."""
    texts: list[str] = []
    tokens: list[int] = []
    logprobs: list[TextLogprob] = []
    last = TextChunk()
    async with aclosing(source):
        async for last in source:
            texts.append(last.text)
            tokens.extend(last.tokens)
            logprobs.extend(last.logprobs)
    return structs.replace(
        last, text="".join(texts), tokens=tuple(tokens), logprobs=tuple(logprobs)
    )


async def merge(sources: Sequence[ChunkStream]) -> AsyncGenerator[tuple[int, TextChunk], None]:
    """Chunks of several answers as they come, with their index; the first failure ends all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for chunk in source:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, TextChunk | Exception]] = asyncio.Queue(maxsize=64)

    async def pump(index: int, source: ChunkStream) -> None:
        try:
            async with aclosing(source):
                async for chunk in source:
                    await queue.put((index, chunk))
        except Exception as error:  # a task's entry point: the consumer below raises it
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump(i, source)) for i, source in enumerate(sources)]
    left = len(tasks)
    try:
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            left -= item.finish is not None
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
