"""`phloem chat`: Ctrl-C stops the answer at the server, Ctrl-D leaves, errors do not end it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable

import pytest

from phloem.engine.api import TextRequest
from tests.server.fake_engine import Gate, Step
from tests.server.live import LiveServer

COMMAND = [sys.executable, "-m", "phloem.cli", "chat"]

pytestmark = pytest.mark.timeout(60)


class Chat:
    """The command in a process of its own, fed by a pipe."""

    def __init__(self, url: str, *flags: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "--url", url, "--max-tokens", "8", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            # A shell that runs tests in the background lets its children ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")

    def read_until(self, wanted: str) -> str:
        """What it prints, up to and with `wanted`."""
        assert self.process.stdout is not None
        seen = ""
        while wanted not in seen:
            piece = self.process.stdout.read(1).decode()
            assert piece, f"ended after {seen!r}"
            seen += piece
        return seen

    def leave(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(20)


def test_ctrl_c_stops_the_answer_at_the_server_and_the_chat_goes_on() -> None:
    calls = 0

    def script(_: TextRequest) -> Iterable[Step]:
        nonlocal calls
        calls += 1
        yield "Well, "
        if calls == 1:
            yield Gate()  # nobody opens it
        yield "yes."

    with LiveServer(script) as server, Chat(server.url) as chat:
        chat.say("Hello?")
        chat.read_until("Well, ")
        chat.process.send_signal(signal.SIGINT)
        assert "stopped]" in chat.read_until("]")
        server.call(lambda: server.engine.until(lambda: len(server.engine.aborted) == 1))
        chat.say("Again?")
        assert "Well, yes." in chat.read_until("]")
        assert chat.leave() == 0
        # What was said so far is part of the second prompt.
        first, second = (request.tokens for request in server.engine.requests)
        assert len(second) > len(first)


def test_an_error_of_the_server_is_shown_and_the_turn_forgotten() -> None:
    with LiveServer() as server, Chat(server.url, "--model", "nobody") as chat:
        chat.say("Hello?")
        assert "error: HTTP 404" in chat.read_until("'nobody'")
        assert chat.leave() == 0


def test_new_forgets_all_but_the_system_message() -> None:
    with LiveServer() as server, Chat(server.url, "--system", "Be brief.") as chat:
        for line in ("One.", "Two.", "/new", "One."):
            chat.say(line)
            if line != "/new":
                chat.read_until("]")
        assert chat.leave() == 0
        one, two, again = (request.tokens for request in server.engine.requests)
        assert one == again != two
