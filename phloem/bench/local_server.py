"""A server of our own for the length of a bench or a chat: a child process on a free port."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import httpx

from phloem.core.errors import ConfigError

__all__ = ["free_port", "local_server"]

START_LIMIT_S = 600.0
STOP_LIMIT_S = 30.0
_POLL_S = 0.1


@contextlib.contextmanager
def local_server(
    model: str,
    flags: Sequence[str] = (),
    *,
    on_wait: Callable[[float], None] = lambda _: None,
) -> Iterator[str]:
    """Start `phloem serve MODEL`, yield its base URL once it is ready, stop it at the end.

    Raises ConfigError with the server's own last line if it does not come up.
    """
    port = free_port()
    command = [sys.executable, "-m", "phloem.cli", "serve", model, "--port", str(port), *flags]
    with tempfile.TemporaryFile() as log:
        # A session of its own: Ctrl-C at the terminal is for us; we stop the server in order.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            if not _wait_until_ready(child, url, on_wait):
                log.seek(0)
                raise ConfigError(f"the server did not start: {_last_line(log.read())}")
            yield url
        finally:
            _stop(child)


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(
    child: subprocess.Popen[bytes], url: str, on_wait: Callable[[float], None]
) -> bool:
    begin = time.monotonic()
    with httpx.Client(trust_env=False, timeout=5.0) as http:
        while child.poll() is None and time.monotonic() - begin < START_LIMIT_S:
            with contextlib.suppress(httpx.HTTPError):
                if http.get(f"{url}/readyz").status_code == 200:
                    return True
            on_wait(time.monotonic() - begin)
            time.sleep(_POLL_S)
    return False


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        child.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _last_line(log: bytes) -> str:
    lines = [line for line in log.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
