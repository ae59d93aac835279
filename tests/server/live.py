"""A real server on a free loopback port, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import uvloop

from phloem.engine.api import TextRequest
from phloem.server import Server, ServerSettings, bind, create_app, serve_async
from tests.server.fake_engine import FakeEngine, Step, letters

T = TypeVar("T")


class LiveServer:
    """Context manager: `url` while it serves; leaves in an orderly way."""

    def __init__(
        self,
        script: Callable[[TextRequest], Iterable[Step]] = letters,
        settings: ServerSettings | None = None,
        **options: Any,
    ) -> None:
        self._script = script
        self._settings = settings
        self._options = options
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-server")
        self.url = ""
        self.exit_code: int | None = None

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.engine = FakeEngine(self._script)
        app = create_app(self.engine, self._settings)
        self.server = Server(app, self.engine, on_ready=self._on_ready, **self._options)
        self.exit_code = await serve_async(self.server, bind("127.0.0.1", 0))

    def _on_ready(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._ready.set()

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine in the server's loop."""

        async def run() -> T:
            return await function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._ready.wait(20), "the server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not end"
