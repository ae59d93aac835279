"""Where one request's chunks wait for the coroutine that reads them."""

from __future__ import annotations

import asyncio

from phloem.core.errors import PhloemError
from phloem.engine.api import TextChunk
from phloem.engine.assembly import merge_chunks

__all__ = ["Mailbox"]


class Mailbox:
    """One writer, one reader, one event loop.

    A reader that is slower than the engine gets what has piled up as one chunk, so what waits is
    never more than the answer itself.
    """

    __slots__ = ("_arrived", "_chunks", "_error")

    def __init__(self) -> None:
        self._chunks: list[TextChunk] = []
        self._error: PhloemError | None = None
        self._arrived = asyncio.Event()

    def put(self, chunk: TextChunk) -> None:
        self._chunks.append(chunk)
        self._arrived.set()

    def fail(self, error: PhloemError) -> None:
        """Nothing follows; what was put before is still read first."""
        self._error = error
        self._arrived.set()

    async def get(self) -> TextChunk:
        """All that has arrived since the last call, as one chunk. Raises what `fail` was given."""
        await self._arrived.wait()
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            if self._error is None:
                self._arrived.clear()
            return merge_chunks(chunks)
        assert self._error is not None, "a mailbox woke up with nothing in it"
        raise self._error
