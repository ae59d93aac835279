"""The parent's end of the engine process: start it, wait for it, stop it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys

from phloem.config import Config, ServerOptions
from phloem.core.errors import ConfigError, EngineDead
from phloem.core.frames import FrameReader
from phloem.engine import messages as msg
from phloem.engine.core import OnLoad
from phloem.engine.heartbeat import Heartbeat

__all__ = ["DEFAULT_BUILDER", "EXIT_GRACE_S", "HOSTS_BUILDER", "EngineProcess"]

logger = logging.getLogger(__name__)

DEFAULT_BUILDER = "phloem.engine.build:build_core"
HOSTS_BUILDER = "phloem.engine.build_hosts:build_core"  # where torchrun has started the ranks
_RECV_BYTES = 1 << 16
EXIT_GRACE_S = 5.0


class EngineProcess:
    """A running child, its socket and its heartbeat. Owns all three."""

    def __init__(self) -> None:
        """Start the child; it waits for `start`."""
        self.heartbeat = Heartbeat.create()
        self.sock, theirs = socket.socketpair()
        self.frames = FrameReader()
        self._failure: str | None = None
        fds = (theirs.fileno(), self.heartbeat.fd)
        # The child finds modules exactly where this process does; with -m alone it would first
        # look into the current folder, where a user's file may be called queue.py.
        search = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        command = [sys.executable, "-P", "-m", "phloem.engine.core_process"]
        command += ["--socket", str(fds[0]), "--heartbeat", str(fds[1])]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": search},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(
        self, config: Config, *, eos_ids: tuple[int, ...], builder: str = DEFAULT_BUILDER
    ) -> None:
        """Say what to load; loading begins at once."""
        # The engine has no use for the server's options, and no business with its API key.
        config = dataclasses.replace(config, server=ServerOptions())
        with contextlib.suppress(ConnectionError):  # wait_ready tells why it died
            self.sock.sendall(msg.frame(msg.Start(builder, config, eos_ids)))

    def wait_ready(self, on_load: OnLoad | None) -> msg.Ready:
        """Block until the model is loaded. Raises ConfigError or EngineDead if it never will."""
        while data := self._recv():
            for body in self.frames.feed(data):
                message = msg.decode_to_front(body)
                match message:
                    case msg.Loading():
                        if on_load is not None:
                            on_load(message.done, message.total, message.phase)
                    case msg.Ready():
                        return message
                    case msg.Failed():
                        self.note_failure(message.message)
                        if message.config:
                            raise ConfigError(message.message)
        raise self.death()

    def _recv(self) -> bytes:
        try:
            return self.sock.recv(_RECV_BYTES)
        except ConnectionError:
            return b""

    def note_failure(self, message: str) -> None:
        """The child's own last words."""
        self._failure = message

    def returncode(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def death(self) -> EngineDead:
        """Wait for the end that is coming (the socket has closed), and say what it was."""
        self.stop(grace_s=1.0)
        code = self._process.returncode
        if self._failure is not None:
            return EngineDead(f"the engine process failed: {self._failure}")
        if code < 0:
            return EngineDead(f"the engine process was killed by {signal.Signals(-code).name}")
        return EngineDead(f"the engine process ended with status {code}")

    def stop(self, *, grace_s: float = EXIT_GRACE_S) -> None:
        """Wait for the child to end; kill it after `grace_s`. Blocks; idempotent."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            logger.warning("the engine process does not end; killing it")
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Kill the child if it still runs, and give back descriptors. Idempotent."""
        self.sock.close()
        if self.returncode() is None:
            self._process.kill()
        self._process.wait()
        self.heartbeat.close()
