"""Ranks that torchrun starts, or somebody by hand: every process for itself, over the loopback
interface."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from phloem.bench.local_server import free_port
from phloem.core.request import SamplingParams
from phloem.engine import LLM
from tests.engine.fakes import byte_tokenizer
from tests.engine.test_ranks import wait_for_end
from tests.models.checkpoints import make_checkpoint
from tests.parity.test_journeys import words

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 100
TRAVELS = ("--remote-kv", "send_q")
PROMPTS = [words(seed, 9 + 17 * seed) for seed in range(1, 5)]
COUNT = 8

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    make_checkpoint("llama", folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    """One rank's, computed alone."""
    greedy = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, logprobs=1)
    with LLM(str(model), dtype="fp32", page_size=4, num_pages=200, threads=1) as llm:
        return [llm.generate(prompt, greedy)[0] for prompt in PROMPTS]


class Launched:
    """Processes that serve together. `children(i)`: what the i-th has started."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._port, self._master = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as they do
        self.processes: list[subprocess.Popen[bytes]] = []

    def torchrun(self, hosts: int, each: int, *flags: str) -> None:
        """One torchrun for each of `hosts`, with `each` ranks."""
        for host in range(hosts):
            command = [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", str(hosts), "--nproc-per-node", str(each), "--node-rank", str(host)),
                *("--master-addr", "127.0.0.1", "--master-port", str(self._master)),
            ]
            self._start([*command, "-m", "phloem", *self._serve(hosts * each, *flags)], {})

    def by_hand(self, rank: int, size: int, *flags: str) -> None:
        """One rank, with the variables set as torchrun would set them."""
        environ = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._master),
        }
        self._start([sys.executable, "-m", "phloem", *self._serve(size, *flags)], environ)

    def _serve(self, size: int, *flags: str) -> list[str]:
        fixed = ["--dtype", "fp32", "--page-size", "4", "--num-pages", "60", "--threads", "1"]
        place = ["--cp", str(size), "--port", str(self._port)]
        return ["serve", str(self._model), *place, *fixed, *flags]

    def _start(self, command: list[str], environ: dict[str, str]) -> None:
        self.processes.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | environ,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=subprocess.STDOUT,
            )
        )

    def wait_ready(self) -> None:
        begin = time.monotonic()
        while time.monotonic() - begin < START_LIMIT_S:
            assert all(each.poll() is None for each in self.processes), self.output()
            try:
                if httpx.get(f"{self.url}/readyz", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)  # another process: there is nothing to wait on but its port
        raise AssertionError(f"not ready after {START_LIMIT_S} s: {self.output()}")

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": COUNT, "temperature": 0, "logprobs": 1}
        body |= {"ignore_eos": True}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60, trust_env=False)
        found: dict[str, Any] = reply.raise_for_status().json()
        return found

    def children(self, index: int) -> list[int]:
        tasks = Path(f"/proc/{self.processes[index].pid}/task").glob("*/children")
        return sorted({int(pid) for file in tasks for pid in file.read_text().split()})

    def output(self) -> str:
        self._out.seek(0)
        return self._out.read().decode(errors="replace")

    def statuses(self, timeout_s: float) -> list[int]:
        """Of all, which are over within so long."""
        deadline_s = time.monotonic() + timeout_s
        return [each.wait(max(0.1, deadline_s - time.monotonic())) for each in self.processes]

    def close(self) -> None:
        for index, each in enumerate(self.processes):
            if each.poll() is None:
                for pid in self.children(index):
                    os.kill(pid, signal.SIGKILL)
                each.kill()
            each.wait()
        self._out.close()


@pytest.fixture
def launched(model: Path) -> Iterator[Launched]:
    made = Launched(model)
    yield made
    made.close()


def check(launched: Launched, expected: list[Any], *, storage: bool = False) -> None:
    """Tokens and their log-probabilities, cold and from cached pages; then from storage."""
    for turn in range(3 if storage else 2):
        if turn == 2:
            httpx.post(f"{launched.url}/flush_cache", trust_env=False).raise_for_status()
        for prompt, one in zip(PROMPTS, expected, strict=True):
            found = launched.ask(prompt)
            cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 0) == (turn > 0)
            choice, logprobs = found["choices"][0], [entry.logprob for entry in one.logprobs]
            assert choice["text"] == one.text
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)


def test_two_hosts_answer_as_one_rank_and_end_when_one_is_killed(
    launched: Launched, expected: list[Any], tmp_path: Path
) -> None:
    """Red if anything needs memory that both map; if a rank or its torchrun lives on."""
    tiers = ("--host-memory", "1MB", "--storage", str(tmp_path), "--prefetch-policy")
    launched.torchrun(2, 1, *TRAVELS, *tiers, "wait_complete")
    launched.wait_ready()
    check(launched, expected, storage=True)
    (front,), (rank,) = launched.children(0), launched.children(1)
    server = os.pidfd_open(front)
    os.kill(rank, signal.SIGKILL)
    assert wait_for_end(server, 5.0)
    os.close(server)
    assert launched.statuses(30) == [1, 1]  # torchrun takes its own time
    assert "rank 1 failed: its connection has closed" in launched.output()


def test_ranks_started_by_hand_drain_on_sigterm(
    launched: Launched, model: Path, tmp_path: Path
) -> None:
    """All of them get it, as from a supervisor. Red if the other rank leaves before the last
    answer is complete and its pages are written down, or if one ends with an error."""
    flags = ("--remote-kv", "gather_kv", "--write-policy", "write_back")
    tiers = ("--host-memory", "1MB", "--storage", str(tmp_path))
    launched.by_hand(1, 2, *flags, *tiers)  # before there is a leader
    launched.by_hand(0, 2, *flags, *tiers)
    launched.wait_ready()
    body = {"prompt": PROMPTS[0], "max_tokens": 80, "stream": True, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True}}
    url, events = f"{launched.url}/v1/completions", []
    with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                if len(events) == 1:
                    for each in launched.processes:
                        each.send_signal(signal.SIGTERM)
    assert events[-1]["usage"]["completion_tokens"] == 80
    assert launched.statuses(20) == [0, 0], launched.output()
    assert "Traceback" not in launched.output()
    alone = {"dtype": "fp32", "page_size": 4, "num_pages": 200, "threads": 1}
    with LLM(str(model), storage=str(tmp_path), prefetch_policy="wait_complete", **alone) as llm:
        assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))[0].cached.storage >= 24


def test_a_row_of_two_hosts_answers_as_one_rank(
    launched: Launched, expected: list[Any], tmp_path: Path
) -> None:
    """Each holds half of the heads, and of the weights. Red if they need memory that both map; if
    what is stored is not whole pages; if a leader waits for a sum to which nobody will add."""
    row = ("--cp", "1", "--tp", "2", "--verify-collectives", "--prefetch-policy", "wait_complete")
    tiers = ("--host-memory", "1MB", "--storage", str(tmp_path))
    launched.by_hand(0, 2, *row, *tiers)
    launched.by_hand(1, 2, *row, *tiers)
    launched.wait_ready()
    check(launched, expected, storage=True)
    body = {"prompt": PROMPTS[0], "max_tokens": 200, "stream": True, "ignore_eos": True}
    url, killed = f"{launched.url}/v1/completions", False
    with (
        contextlib.suppress(httpx.TransportError),
        httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as reply,
    ):
        for _ in reply.iter_lines():
            if not killed:
                launched.processes[1].kill()
            killed = True
    assert killed
    assert launched.statuses(20) == [1, -signal.SIGKILL], launched.output()
    said = launched.output()
    assert "2 processes (cp 1 x tp 2), 60 pages for each 2 of them" in said
    assert "rank 1 failed: its connection has closed" in said


@pytest.mark.long
@pytest.mark.parametrize("remote_kv", ["send_q", "auto"])
def test_rows_on_two_hosts_answer_as_one_rank(
    launched: Launched, expected: list[Any], remote_kv: str
) -> None:
    """Two rows of two: each host has one."""
    launched.torchrun(2, 2, "--cp", "2", "--tp", "2", "--remote-kv", remote_kv)
    launched.wait_ready()
    check(launched, expected)
    launched.processes[0].send_signal(signal.SIGTERM)
    launched.statuses(30)
    assert "this rank ends with status" not in launched.output()


@pytest.mark.long
def test_a_killed_leader_ends_the_others_with_an_error(launched: Launched) -> None:
    """Red if whoever supervises the other host is told that all is well."""
    launched.by_hand(0, 2, *TRAVELS)
    launched.by_hand(1, 2, *TRAVELS)
    launched.wait_ready()
    launched.processes[0].kill()
    assert launched.processes[1].wait(5) == 1
    assert "rank 1: this rank ends with status 1" in launched.output()


@pytest.mark.long
def test_ranks_of_one_torchrun_share_memory_and_tiers(
    launched: Launched, expected: list[Any]
) -> None:
    """Two rows of one machine; others' pages are read in place, which ranks apart refuse."""
    square = ("--cp", "2", "--tp", "2", "--remote-kv", "direct")
    launched.torchrun(1, 4, *square, "--host-memory", "1MB")
    launched.wait_ready()
    check(launched, expected)
    (front, *_) = launched.children(0)
    launched.processes[0].send_signal(signal.SIGTERM)
    launched.statuses(30)
    assert not Path(f"/proc/{front}").exists()
    assert "4 processes (cp 2 x tp 2), 60 pages for each 2 of them" in launched.output()


@pytest.mark.long
@pytest.mark.parametrize("remote_kv", ["send_q", "gather_kv"])
def test_two_hosts_of_two_ranks_answer_as_one_rank(
    launched: Launched, expected: list[Any], remote_kv: str
) -> None:
    launched.torchrun(2, 2, "--remote-kv", remote_kv)
    launched.wait_ready()
    check(launched, expected)


@pytest.mark.long
def test_a_leader_whose_rank_never_joins_says_which(launched: Launched) -> None:
    launched.by_hand(2, 3, *TRAVELS)
    launched.by_hand(0, 3, *TRAVELS, "--join-timeout-s", "12")
    assert launched.statuses(100) == [1, 1]
    assert "rank 1 has not joined for 12 s" in launched.output()
