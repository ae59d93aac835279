"""Signals end a real server process in the promised way."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.server.http import completion, events


class Process:
    def __init__(self, drain_s: float, port: int = 0) -> None:
        command = [sys.executable, "-m", "tests.server.serve_fake", str(port), str(drain_s)]
        self.child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def facts(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, self.child.communicate()[1]
        return json.loads(line)


@contextmanager
def serving(drain_s: float = 10) -> Iterator[tuple[Process, str]]:
    process = Process(drain_s)
    try:
        yield process, f"http://127.0.0.1:{process.facts()['port']}"
    finally:
        process.child.kill()
        process.child.communicate()


class Streaming(threading.Thread):
    """Reads one streamed answer; `started` once its first token is here."""

    def __init__(self, url: str, prompt: str, tokens: int) -> None:
        super().__init__()
        self.url, self.body = url, completion(prompt, max_tokens=tokens, stream=True)
        self.begun = threading.Event()
        self.text = ""
        self.error: Exception | None = None
        self.start()
        assert self.begun.wait(10)

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=self.body) as answer:
                for text in answer.iter_text():
                    self.text += text
                    self.begun.set()
        except httpx.HTTPError as error:
            self.error = error


def until_nobody_listens(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with contextlib.suppress(ConnectionError):
        while True:
            socket.create_connection((host, int(port)), timeout=5).close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_running_answers_finish(number: signal.Signals) -> None:
    with serving() as (process, url):
        answer = Streaming(url, "slow", 40)
        process.child.send_signal(number)
        answer.join(10)
        assert process.facts() == {"finished": 1, "aborted": 0, "closed": 1}
        assert process.child.wait(10) == 0
    assert answer.error is None
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    assert len("".join(chunk["choices"][0]["text"] for chunk in chunks)) == 40


def test_while_draining_nobody_new_is_let_in() -> None:
    with serving() as (process, url):
        with httpx.Client(base_url=url) as kept:
            kept.get("/health")  # a kept-alive connection
            answer = Streaming(url, "slow", 40)
            process.child.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 5
            refused = False
            while not refused and answer.is_alive() and time.monotonic() < deadline:
                try:
                    late = kept.post("/v1/completions", json=completion("late", max_tokens=1))
                    refused = late.status_code == 503
                except httpx.HTTPError:
                    refused = True
            assert refused, "a request got in after the signal"
        answer.join(10)
        assert process.child.wait(10) == 0
    assert answer.text.endswith("data: [DONE]\n\n")


def test_the_drain_time_ends_answers_that_do_not() -> None:
    with serving(drain_s=0.3) as (process, url):
        answer = Streaming(url, "stuck", 9)
        start = time.monotonic()
        process.child.send_signal(signal.SIGTERM)
        assert process.facts()["closed"] == 1
        assert process.child.wait(10) == 0
        assert time.monotonic() - start < 4
        answer.join(10)
    last, done = events(answer.text)[-2:]
    assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")


def test_the_second_signal_ends_at_once() -> None:
    with serving(drain_s=600) as (process, url):
        answer = Streaming(url, "stuck", 9)
        process.child.send_signal(signal.SIGTERM)
        until_nobody_listens(url)  # so the first one is at work
        start = time.monotonic()
        process.child.send_signal(signal.SIGINT)
        assert process.facts() == {"finished": 0, "aborted": 1, "closed": 1}
        assert process.child.wait(10) == 1
        assert time.monotonic() - start < 5
        answer.join(10)
    assert "[DONE]" not in answer.text


def test_an_idle_server_leaves_at_once() -> None:
    with serving() as (process, url):
        with httpx.Client(base_url=url) as kept:
            kept.get("/health")
            start = time.monotonic()
            process.child.send_signal(signal.SIGTERM)
            assert process.child.wait(10) == 0
            assert time.monotonic() - start < 3
        assert process.child.communicate()[1] == ""


def test_a_server_whose_engine_has_ended_says_so_and_ends() -> None:
    """Exit code 1 and one line: a supervisor starts it anew; the request gets its error first."""
    with serving() as (process, url):
        answer = httpx.post(f"{url}/v1/completions", json=completion("die"))
        assert answer.status_code == 503
        assert process.child.wait(10) == 1
        assert "killed; the server stops" in process.child.communicate()[1]


def test_a_taken_port_is_one_clear_line() -> None:
    with serving() as (_, url):
        port = int(url.rpartition(":")[2])
        second = Process(1, port)
        _, said = second.child.communicate(timeout=20)
    assert second.child.returncode == 2
    assert said.count("\n") == 1
    assert f"cannot listen on 127.0.0.1:{port}" in said
