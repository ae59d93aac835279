"""A response that stops working the moment its client is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phloem.core.errors import PhloemError
from phloem.server.errors import describe, internal_error

__all__ = ["DONE", "JsonAnswer", "SseAnswer", "event"]

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(document: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + document + b"\n\n"


class _Watched(Response):
    """Runs `_work` and cancels it when the connection closes; raises what it raises."""

    def __init__(self) -> None:
        super().__init__()

    async def _work(self, send: Send) -> None:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        work = asyncio.create_task(self._work(send))
        watch = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            work.result()
        finally:
            watch.cancel()
            work.cancel()
            await asyncio.wait((watch, work))  # the engine's iterators are closed after this


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class JsonAnswer(_Watched):
    """One JSON document, when it is ready."""

    def __init__(self, make: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self._make = make

    async def _work(self, send: Send) -> None:
        body = msgspec.json.encode(await self._make())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class SseAnswer(_Watched):
    """A stream of ready-made events, ended by [DONE].

    The status line waits for the first event, so that a refusal has its own status. An error
    after that becomes an error event, and then the stream ends without [DONE].
    """

    def __init__(self, events: AsyncGenerator[bytes, None], request_id: str) -> None:
        super().__init__()
        self._events = events
        self._request_id = request_id

    async def _work(self, send: Send) -> None:
        started = False
        last = DONE
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    if not started:
                        await _start_events(send)
                        started = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except PhloemError as error:
                if not started:
                    raise
                last = event(describe(error)[1])
            except Exception:  # headers are out: only an event can still tell the client
                if not started:
                    raise
                logger.exception("request %s failed in mid-stream", self._request_id)
                last = event(internal_error(self._request_id))
        await send({"type": "http.response.body", "body": last})


async def _start_events(send: Send) -> None:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # else nginx gathers tokens before it passes them on
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
