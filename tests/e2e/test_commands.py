"""The commands of the README, as a stranger would type them, against the small model."""

from __future__ import annotations

import json
import os
import re
import shutil
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
from tests.models.checkpoints import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PHLOEM = [sys.executable, "-m", "phloem.cli"]
START_LIMIT_S = 100

pytestmark = pytest.mark.timeout(180)


class Served:
    """`phloem serve` in a process of its own; with one thread, as other tests run beside this one:
    two that wait for each other in every layer are slow where one of them has no core."""

    def __init__(self, *flags: str, model: str = "smollm2") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        command = [*PHLOEM, "serve", model, "--port", str(self.port), "--threads", "1", *flags]
        self.process = subprocess.Popen(command, stdout=self._out, stderr=subprocess.STDOUT)
        self._wait()

    def _wait(self) -> None:
        begin = time.monotonic()
        while time.monotonic() - begin < START_LIMIT_S:
            assert self.process.poll() is None, self.output()
            try:
                if httpx.get(f"{self.url}/readyz", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                self.process.poll()
            time.sleep(0.1)  # another process: there is nothing to wait on but its port
        raise AssertionError(f"not ready after {START_LIMIT_S} s: {self.output()}")

    def output(self) -> str:
        self._out.seek(0)
        return self._out.read().decode()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served("--num-pages", "600", "--max-model-len", "2048")
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait()


def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PHLOEM, *words], input=stdin, capture_output=True, text=True, check=False, timeout=170
    )


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.S)


def test_start_up_shows_what_was_loaded_and_a_request_to_paste(served: Served) -> None:
    out = served.output()
    for row in ("model", "dtype", "page size", "pages", "token capacity", "KV memory"):
        assert re.search(rf"^{row} ", out, re.M), out
    assert f"Serving smollm2 at {served.url}" in out


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("source", ["readme", "start-up"])
def test_the_curl_line_works_as_it_is_printed(served: Served, source: str) -> None:
    text = README if source == "readme" else served.output()
    (command,) = re.findall(r"^curl [^\n]*\n(?:  [^\n]*\n?)+", text, re.M)
    command = command.replace("http://127.0.0.1:8000", served.url)
    command = command.replace('"messages"', '"max_tokens": 8, "messages"')
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120
    )
    reply = json.loads(done.stdout)
    assert reply["choices"][0]["message"]["content"]
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_the_readmes_client_sees_its_second_turn_cached(served: Served) -> None:
    block = python_blocks()[0].replace("http://127.0.0.1:8000", served.url)
    block = block.replace("max_tokens=80", "max_tokens=24")
    done = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, check=False, timeout=170
    )
    assert done.returncode == 0, done.stderr
    prompt, cached = map(int, done.stdout.split()[-2:])
    # Two thirds at least: the whole first turn but for a page, and the second question.
    assert prompt / 2 < cached < prompt


def test_the_readmes_offline_example_runs() -> None:
    block = python_blocks()[1].replace('LLM("smollm2")', 'LLM("smollm2", num_pages=64)')
    done = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, check=False, timeout=170
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_chat_shows_what_was_cached(served: Served) -> None:
    lines = "Name three colours.\nAnd a fourth one?\n/new\nName three colours.\n"
    done = run("chat", "--url", served.url, "--max-tokens", "8", stdin=lines)
    assert done.returncode == 0, done.stderr
    counts = [
        tuple(map(int, m)) for m in re.findall(r"prompt (\d+) tokens, (\d+) cached", done.stdout)
    ]
    assert len(counts) == 3
    assert counts[1][1] >= 16
    assert counts[2][0] == counts[0][0]
    assert counts[2][1] == (counts[0][0] - 1) // 16 * 16


@pytest.mark.parametrize("prompts", ["tokens", "chat"])
def test_bench_serve_reports_the_hit_rate_of_its_run(served: Served, prompts: str) -> None:
    done = run(
        *("bench", "serve", "--url", served.url, "--requests", "6", "--clients", "1"),
        *("--max-tokens", "2", "--prefix-tokens", "64", "--unique-tokens", "16"),
        *("--groups", "1", "--prompts", prompts, "--seed", str(served.port)),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    values = {item["name"]: item["value"] for item in document["results"]}
    assert (values["errors"], values["requests"], values["output_tokens"]) == (0, 6, 12)
    if prompts == "tokens":
        assert values["hit_rate"] == 5 * 64 / (6 * 80)
    assert 0.4 < values["hit_rate"] < 0.95


def test_bench_prefix_says_which_prompt_does_not_fit(served: Served) -> None:
    """Its pairs run; then its prefill of 2,048 tokens meets the server's limit."""
    done = run(
        *("bench", "prefix", "--url", served.url, "--cached-tokens", "512", "--pairs", "2"),
        *("--repeats", "1", "--decode-tokens", "3"),
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "2048" in done.stderr.replace(",", "")


def test_replay_through_the_real_engine_equals_the_simulated_one(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [(40, [0, 1, 2]), (80, [0, 1, 2, 3, 4]), (33, [9, 1, 2]), (80, [0, 1, 2, 3, 5])]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": i, "input_length": n, "output_length": 1, "hash_ids": ids})
            + "\n"
            for i, (n, ids) in enumerate(lines)
        ),
        encoding="utf-8",
    )
    real = run("replay", str(trace), "--pages", "8", "--model", "smollm2", "--json")
    simulated = run("replay", str(trace), "--pages", "8", "--json")
    assert real.returncode == simulated.returncode == 0, real.stderr + simulated.stderr
    assert real.stdout.splitlines()[-1] == simulated.stdout.splitlines()[-1]
    assert json.loads(real.stdout)["cached_tokens"] == 32 + 64


def test_a_port_in_use_is_one_line_before_anything_is_loaded(served: Served) -> None:
    begin = time.monotonic()
    done = run("serve", "smollm2", "--port", str(served.port))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot listen" in done.stderr
    assert time.monotonic() - begin < 30


def test_sigterm_ends_it_in_order(served: Served) -> None:
    """Near the end of this file: it ends the server that the others use."""
    assert served.stop() == 0
    assert "Traceback" not in served.output()


def test_a_killed_engine_ends_the_server_with_a_message(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    server = Served("--num-pages", "64", "--max-model-len", "512", model=str(tmp_path))
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    (engine,) = [int(pid) for path in children for pid in path.read_text().split()]
    os.kill(engine, signal.SIGKILL)
    assert server.process.wait(10) == 1
    assert "the engine process has ended (status -9); the server stops" in server.output()
    assert "Traceback" not in server.output()
