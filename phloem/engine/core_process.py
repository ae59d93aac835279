"""The engine process: `python -m phloem.engine.core_process --socket FD --heartbeat FD`.

    reader thread --- inbox ---> main thread: messages, a pass of the loop, one message out
                                 worker thread (the core's own): the model

The parent owns the life of this process: it ends on `Shutdown`, and by itself when the socket
closes. Terminal signals (Ctrl-C, SIGTERM to the whole group) are the parent's business.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import logging
import os
import queue
import signal
import socket
import threading
import time
import traceback
from typing import TypeAlias

from phloem.core.errors import ConfigError, EngineDead, UserError
from phloem.core.frames import FrameReader
from phloem.core.request import GenerateRequest, OutputChunk
from phloem.engine import messages as msg
from phloem.engine.commands import CommandReply
from phloem.engine.core import CoreBuilder, EngineCore
from phloem.engine.heartbeat import Heartbeat, LoopState

__all__ = ["main"]

logger = logging.getLogger(__name__)

_RECV_BYTES = 1 << 16
_ORPHAN_GRACE_S = 2.0  # a step in flight may end in this time; then the process is torn down
_LOAD_REPORT_S = 0.05


class _Wake:
    """The core wants to be looked at."""


_Inbox: TypeAlias = "queue.SimpleQueue[msg.ToEngine | _Wake | None]"  # None: the parent is gone


class _ParentGone(Exception):
    """The socket closed without a `Shutdown`."""


class _Stop(Exception):
    """The parent said `Shutdown`."""


def _read_forever(sock: socket.socket, inbox: _Inbox) -> None:
    """Body of the reader thread: never blocks the parent, whatever the loop is doing."""
    frames = FrameReader()
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(_RECV_BYTES):
            for body in frames.feed(data):
                inbox.put(msg.decode_to_engine(body))
    inbox.put(None)
    orphan = threading.Timer(_ORPHAN_GRACE_S, os._exit, args=(1,))
    orphan.daemon = True
    orphan.start()


class CoreProcess:
    """Drives one core between the two ends of a socket."""

    def __init__(self, sock: socket.socket, heartbeat: Heartbeat) -> None:
        self._sock = sock
        self._heartbeat = heartbeat
        self._inbox: _Inbox = queue.SimpleQueue()
        self._reported_s = 0.0
        self._core: EngineCore | None = None  # once it serves

    # What the core calls (`BuildHooks`).

    def emit(self, chunks: list[OutputChunk]) -> None:
        if chunks:
            self._send(msg.Outputs(chunks))

    def on_wait(self) -> None:
        core = self._core
        while core is not None and not self._inbox.empty():
            self._handle(core, self._take())

    def wake(self) -> None:
        self._inbox.put(_Wake())

    def on_layer(self) -> None:
        self._heartbeat.beat_layer()

    def on_load(self, done: int, total: int, phase: str) -> None:
        self._heartbeat.beat(LoopState.LOADING)
        now_s = time.monotonic()
        if done >= total or now_s - self._reported_s >= _LOAD_REPORT_S:
            self._reported_s = now_s
            self._send(msg.Loading(done, total, phase))

    # The life of the process.

    def run(self) -> int:
        """Serve until told to stop; the exit status."""
        threading.Thread(
            target=_read_forever, args=(self._sock, self._inbox), name="inbox", daemon=True
        ).start()
        try:
            core = self._build()
            try:
                self._serve(core)
            except _Stop:
                core.farewell()
                raise
            finally:
                core.close()
        except _Stop:
            return 0
        except (_ParentGone, ConnectionError):
            return 1
        except ConfigError as error:
            return self._fail(str(error), config=True)
        except EngineDead as error:  # whoever found it has said so in the log
            return self._fail(str(error), config=False)
        except Exception as error:  # a process's entry point: the parent must hear of it in a line
            logger.error("the engine failed\n%s", traceback.format_exc())
            return self._fail(f"{type(error).__name__}: {error}", config=False)
        finally:
            self._heartbeat.beat(LoopState.DEAD)
        return 0

    def _build(self) -> EngineCore:
        start = self._take()
        assert isinstance(start, msg.Start), f"the first message must be Start, got {start!r}"
        logging.basicConfig(
            level=start.config.runtime.log_level.upper(),
            format="%(asctime)s %(levelname)s engine: %(message)s",
        )
        module, _, function = start.builder.partition(":")
        build: CoreBuilder = getattr(importlib.import_module(module), function)
        core = build(start.config, self, start.eos_ids)
        # Weights and vocabulary live as long as the process: keep them out of collections.
        gc.collect()
        gc.freeze()
        self._send(msg.Ready(core.facts, core.stats()))
        return core

    def _serve(self, core: EngineCore) -> None:
        self._core = core
        idle = True
        while True:
            if idle:
                self._heartbeat.beat(LoopState.IDLE)
                self._handle(core, self._take())
            while not self._inbox.empty():
                self._handle(core, self._take())
            self._heartbeat.beat(LoopState.BUSY)
            idle = not core.step()

    def _take(self) -> msg.ToEngine | _Wake:
        message = self._inbox.get()
        if message is None:
            raise _ParentGone
        return message

    def _handle(self, core: EngineCore, message: msg.ToEngine | _Wake) -> None:
        match message:
            case _Wake():
                pass  # the next pass looks
            case msg.Add():
                self._add(core, message.request)
            case msg.Abort():
                core.abort(message.request_id)
            case msg.Stats():
                self._send(msg.StatsReply(message.call, core.stats()))
            case msg.Flush():
                self._send(msg.Flushed(message.call, core.flush()))
            case msg.Operate():
                core.command(message.command, functools.partial(self._operated, message.call))
            case msg.Shutdown():
                raise _Stop
            case _:
                raise AssertionError(f"unexpected message {message!r}")

    def _add(self, core: EngineCore, request: GenerateRequest) -> None:
        try:
            core.add(request)
        except UserError as error:
            self._send(
                msg.Refused(
                    request.request_id, error.status, error.message, error.param, error.code
                )
            )

    def _operated(self, call: int, reply: CommandReply) -> None:
        with contextlib.suppress(ConnectionError):  # nobody waits for it any more
            self._send(msg.Operated(call, reply))

    def _fail(self, message: str, *, config: bool) -> int:
        with contextlib.suppress(ConnectionError):
            self._send(msg.Failed(message, config))
        return 2 if config else 1

    def _send(self, message: msg.ToFront) -> None:
        self._sock.sendall(msg.frame(message))


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description="Started by Phloem itself, not by hand.")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--heartbeat", type=int, required=True)
    args = parser.parse_args()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    with socket.socket(fileno=args.socket) as sock:
        return CoreProcess(sock, Heartbeat(args.heartbeat)).run()


if __name__ == "__main__":
    status = main()
    # Threads of libraries may still run; all that has to be closed in order has been.
    logging.shutdown()
    os._exit(status)
