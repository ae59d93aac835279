"""One server as a child process: started, waited for, measured, stopped by its process id."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from phloem.bench.compare.peer import Attached, Launch, PeerUnavailable

__all__ = ["Server", "process_tree", "running", "tree_peak_rss"]

START_LIMIT_S = 900.0
STOP_LIMIT_S = 60.0
_POLL_S = 0.2
_TAIL_LINES = 3


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers. `pid` leads a session of its own; None: it is not our child."""

    url: str
    pid: int | None
    start_s: float  # from its start until it was ready


@contextlib.contextmanager
def running(launch: Launch | Attached, port: int) -> Iterator[Server]:
    """Start, wait until it answers, yield it, stop it. Raises PeerUnavailable if it does not come.

    The reason is what it said last.
    """
    if isinstance(launch, Attached):
        yield Server(launch.url, None, 0.0)
        return
    with tempfile.TemporaryFile() as out, contextlib.ExitStack() as stack:
        began = time.monotonic()
        child = subprocess.Popen(
            launch.argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **launch.env},
            start_new_session=True,
        )
        stack.callback(_stop, child)
        url = f"http://127.0.0.1:{port}"
        if not _wait_until_ready(child, url + launch.ready_path):
            out.seek(0)
            raise PeerUnavailable(f"it did not start: {_reason(out.read())}")
        yield Server(url, child.pid, time.monotonic() - began)


def process_tree(pid: int) -> list[int]:
    """A process and all that descend from it, as far as they still run."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                children = (task / "children").read_text()
                found += [int(child) for child in children.split() if int(child) not in found]
    return found


def tree_peak_rss(pid: int) -> int:
    """Peak resident bytes of a process and its descendants, summed: shared pages count twice."""
    total = 0
    for one in process_tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
    return total


def _wait_until_ready(child: subprocess.Popen[bytes], url: str) -> bool:
    begin = time.monotonic()
    with httpx.Client(trust_env=False, timeout=5.0) as http:
        while child.poll() is None and time.monotonic() - begin < START_LIMIT_S:
            with contextlib.suppress(httpx.HTTPError):
                if http.get(url).status_code == 200:
                    return True
            time.sleep(_POLL_S)
    return False


def _stop(child: subprocess.Popen[bytes]) -> None:
    """In order, then by force; also descendants that outlive their parent."""
    tree = process_tree(child.pid)
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        child.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    left = [pid for pid in tree[1:] if _leads_to(pid, child.pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + STOP_LIMIT_S
    while any(_runs(pid) for pid in left) and time.monotonic() < until:
        time.sleep(_POLL_S / 10)  # their memory is needed for what starts next


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _leads_to(pid: int, session: int) -> bool:
    """Whether `pid` still is the process we saw: ids are used again, sessions tell them apart."""
    try:
        return os.getsid(pid) == session
    except ProcessLookupError:
        return False


def _reason(log: bytes) -> str:
    lines = [line.strip() for line in log.decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error" in line]
    return " | ".join((errors or lines)[-_TAIL_LINES:]) or "it said nothing"
