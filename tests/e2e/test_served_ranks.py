"""`phloem serve --cp 2`: all of it starts and ends as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from phloem.bench.local_server import free_port
from tests.engine.fakes import byte_tokenizer
from tests.engine.test_ranks import rank_pids
from tests.models.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    make_checkpoint("llama", folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


class Served:
    """A server of two ranks in a process of its own."""

    def __init__(self, model: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        command = [sys.executable, "-m", "phloem.cli", "serve", str(model), "--port", str(port)]
        command += ["--cp", "2", "--num-pages", "64", "--dtype", "fp32", "--threads", "1"]
        self.process = subprocess.Popen(command, stdout=self._out, stderr=subprocess.STDOUT)
        while "Serving" not in self.output():
            assert self.process.poll() is None, self.output()
            time.sleep(0.1)  # nothing tells when a line has been printed
        engines = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        (self.engine,) = {int(pid) for file in engines for pid in file.read_text().split()}
        (self.rank,) = rank_pids(self.engine)

    def output(self) -> str:
        self._out.seek(0)
        return self._out.read().decode()

    def ask(self, count: int) -> str:
        body = {"prompt": "hello world", "max_tokens": count, "temperature": 0}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60, trust_env=False)
        text: str = reply.raise_for_status().json()["choices"][0]["text"]
        return text

    def gone(self) -> bool:
        return not any(Path(f"/proc/{pid}/stat").exists() for pid in (self.engine, self.rank))


@pytest.fixture
def served(model: Path) -> Iterator[Served]:
    server = Served(model)
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait()


def test_sigterm_ends_all_of_it_in_order(served: Served) -> None:
    assert served.ask(5) == served.ask(5)
    assert "2 processes of 64 pages each, striped" in served.output()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(20) == 0
    assert served.gone()
    assert "Traceback" not in served.output()


def test_a_killed_rank_ends_all_of_it_within_five_seconds(served: Served) -> None:
    served.ask(5)
    os.kill(served.rank, signal.SIGKILL)
    before_s = time.monotonic()
    assert served.process.wait(20) == 1
    assert time.monotonic() - before_s < 5.0
    assert served.gone()
    assert "rank 1 failed: its process was killed by SIGKILL" in served.output()
