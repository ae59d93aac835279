"""`phloem serve --cp 2`: all of it starts and ends as one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_commands import Served
from tests.engine.fakes import byte_tokenizer
from tests.engine.test_ranks import rank_pids
from tests.models.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    make_checkpoint("llama", folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


class ServedRanks(Served):
    """A server of two ranks."""

    def __init__(self, model: Path) -> None:
        flags = ["--cp", "2", "--num-pages", "64", "--dtype", "fp32", "--threads", "1"]
        super().__init__(*flags, model=str(model))
        engines = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        (self.engine,) = {int(pid) for file in engines for pid in file.read_text().split()}
        (self.rank,) = rank_pids(self.engine)

    def ask(self, count: int) -> str:
        body = {"prompt": "hello world", "max_tokens": count, "temperature": 0}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60, trust_env=False)
        text: str = reply.raise_for_status().json()["choices"][0]["text"]
        return text

    def gone(self) -> bool:
        return not any(Path(f"/proc/{pid}/stat").exists() for pid in (self.engine, self.rank))


@pytest.fixture
def served(model: Path) -> Iterator[ServedRanks]:
    server = ServedRanks(model)
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait()


def test_sigterm_ends_all_of_it_in_order(served: ServedRanks) -> None:
    assert served.ask(5) == served.ask(5)
    assert "2 processes of 64 pages each, striped" in served.output()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(20) == 0
    assert served.gone()
    assert "Traceback" not in served.output()


def test_a_killed_rank_ends_all_of_it_within_five_seconds(served: ServedRanks) -> None:
    served.ask(5)
    os.kill(served.rank, signal.SIGKILL)
    before_s = time.monotonic()
    assert served.process.wait(20) == 1
    assert time.monotonic() - before_s < 5.0
    assert served.gone()
    assert "rank 1 failed: its process was killed by SIGKILL" in served.output()
