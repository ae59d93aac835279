"""From a listening socket to an orderly end.

First SIGTERM or SIGINT: stop listening, refuse new requests, let running ones finish (at most
`drain_timeout_s`), close the engine, exit code 0. Second: abort what runs, at once, exit code 1.
The engine's process ends by itself: open requests get their error, exit code 1 and one line, so
that whatever supervises the server starts it anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from phloem.core.errors import ConfigError
from phloem.engine.api import EngineClient

__all__ = ["Server", "bind", "serve", "serve_async"]

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_FORCED_CLOSE_S = 5.0
_SLOW_CLIENT_S = 5.0
_KEEP_ALIVE_S = 75.0  # longer than the pools of common clients keep an idle connection


def bind(host: str, port: int) -> socket.socket:
    """A listening address, taken early: before minutes of loading. Port 0: any free one.

    Raises ConfigError with what to do.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = infos[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; choose another address with --host, --port"
        ) from None
    return sock


class Server(uvicorn.Server):
    """Uvicorn with our signals and our end."""

    def __init__(
        self,
        app: FastAPI,
        engine: EngineClient,
        *,
        on_ready: Callable[[int], None] | None = None,
        drain_timeout_s: float = 30.0,
        access_log: bool = False,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                loop="uvloop",
                http="httptools",
                ws="none",
                log_config=None,
                log_level="info" if access_log else "warning",
                access_log=access_log,
                server_header=False,
                timeout_keep_alive=int(_KEEP_ALIVE_S),
                # The engine's drain ends answers; this ends clients that do not read theirs.
                timeout_graceful_shutdown=math.ceil(drain_timeout_s + _SLOW_CLIENT_S),
            )
        )
        self.engine = engine
        self._on_ready = on_ready
        self._drain_timeout_s = drain_timeout_s
        self._forced = asyncio.Event()
        self.orphaned = False  # the engine has ended

    def stop(self) -> None:
        """End in an orderly way; called again: at once. Safe from a signal handler of the loop."""
        if self.should_exit:
            self.force_exit = True
            self._forced.set()
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: has the engine ended?"""
        if not self.should_exit and (health := self.engine.health()).ended:
            logger.error("%s; the server stops", health.reason)
            self.orphaned = True
            self.should_exit = True
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Our own handlers, in the loop; a server in another thread than the main one has none."""
        loop = asyncio.get_running_loop()
        try:
            for number in _SIGNALS:
                loop.add_signal_handler(number, self.stop)
        except (ValueError, RuntimeError):
            yield
            return
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and tell. Raises ConfigError if another one took the address meanwhile."""
        try:
            await super().startup(sockets)
        except OSError as error:
            raise ConfigError(f"cannot listen: {error}") from None
        if self.started and self._on_ready is not None:
            self._on_ready(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening and wait for running answers, or for the second signal."""
        drain = asyncio.create_task(self.engine.drain(self._drain_timeout_s))
        finish = asyncio.create_task(self._finish(drain, sockets))
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait((finish, forced), return_when=asyncio.FIRST_COMPLETED)
        if not finish.done():
            logger.warning("forced: %d answers cut off", len(self.server_state.tasks))
            answers = list(self.server_state.tasks)
            for task in (finish, drain, *answers):
                task.cancel()
            await asyncio.wait((finish, drain, *answers), timeout=_FORCED_CLOSE_S)
        forced.cancel()

    async def _finish(self, drain: asyncio.Task[bool], sockets: list[socket.socket] | None) -> None:
        await super().shutdown(sockets)
        if not await drain:
            logger.warning("some requests ran over %g s and were aborted", self._drain_timeout_s)


async def serve_async(server: Server, sock: socket.socket) -> int:
    """Serve in the running loop until stopped, close the engine, return the exit code."""
    engine = server.engine
    try:
        await server.serve(sockets=[sock])
    finally:
        limit = _FORCED_CLOSE_S if server.force_exit else None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.close(), limit)
    return 1 if server.force_exit or server.orphaned else 0


def serve(
    app: FastAPI,
    engine: EngineClient,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    on_ready: Callable[[int], None] | None = None,
    drain_timeout_s: float = 30.0,
    access_log: bool = False,
) -> int:
    """Serve in this thread until a signal; `on_ready(port)` when requests can come.

    Closes the engine. Returns the exit code. Raises ConfigError if the address cannot be had.
    """
    sock = bind(host, port)
    server = Server(
        app, engine, on_ready=on_ready, drain_timeout_s=drain_timeout_s, access_log=access_log
    )
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        return runner.run(serve_async(server, sock))
