"""O-35: a client that leaves takes its request with it; one that has its answer aborts nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

import httpx
import pytest

from phloem.core.request import FinishReason
from phloem.engine.api import TextChunk, TextRequest
from tests.server.fake_engine import Gate, Step, ids_of
from tests.server.http import chat, completion
from tests.server.live import LiveServer

GATES: dict[str, Gate] = {}


def script(request: TextRequest) -> Iterable[Step]:
    """A prompt that names a gate stops there, before or after its first token."""
    text = bytes(ids_of(request)).decode("utf-8", "replace")
    for name, gate in GATES.items():
        if name in text:
            first = [] if "before" in name else ["first"]
            return [*first, gate, *("x" for _ in range(request.sampling.max_tokens))]
    return ["ok"]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with LiveServer(script) as server:
        yield server


def gate(live: LiveServer, name: str) -> Gate:
    async def make() -> Gate:
        return Gate()

    GATES[name] = live.call(make)
    return GATES[name]


def post(live: LiveServer, path: str, body: dict[str, object]) -> socket.socket:
    """Send a request on a bare socket, so that closing it is all that happens."""
    data = json.dumps(body).encode()
    host, port = live.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=5)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def wait(live: LiveServer, condition: Callable[[], bool]) -> None:
    live.call(lambda: live.engine.until(condition))


def next_request_works(live: LiveServer) -> None:
    answer = httpx.post(f"{live.url}/v1/completions", json=completion("next"))
    assert answer.json()["choices"][0]["text"] == "ok"
    wait(live, lambda: not live.engine.running)


def test_o35_a_stream_closed_after_its_first_chunk(live: LiveServer) -> None:
    stop = gate(live, "a-after")
    aborted = len(live.engine.aborted)
    with closing(post(live, "/v1/chat/completions", chat("a-after", stream=True))) as sock:
        received = b""
        while b"first" not in received:
            received += sock.recv(65536)
        live.call(stop.reached.wait)
    wait(live, lambda: len(live.engine.aborted) == aborted + 1)
    next_request_works(live)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_o35_b_closed_while_waiting(live: LiveServer, path: str, where: str, stream: bool) -> None:
    """Before: queued or in prefill, as the server sees it. After: between two tokens."""
    name = f"b-{where}"
    stop = gate(live, name)
    aborted = len(live.engine.aborted)
    bodies = {
        "/v1/chat/completions": chat(name, stream=stream),
        "/v1/completions": completion(name, stream=stream),
        "/generate": {"text": name, "stream": stream},
    }
    with closing(post(live, path, bodies[path])):
        live.call(stop.reached.wait)
    wait(live, lambda: len(live.engine.aborted) == aborted + 1)
    assert live.engine.running == set()
    next_request_works(live)


@pytest.mark.parametrize("stream", [False, True])
def test_o35_c_several_prompts_end_together(live: LiveServer, stream: bool) -> None:
    stop = gate(live, "c-before")
    aborted = len(live.engine.aborted)
    body = completion(["c-before"] * 4, stream=stream)
    with closing(post(live, "/v1/completions", body)):
        live.call(stop.reached.wait)
        wait(live, lambda: len(live.engine.running) == 4)
    wait(live, lambda: len(live.engine.aborted) == aborted + 4)
    next_request_works(live)


@pytest.mark.parametrize("stream", [False, True])
def test_o35_d_a_finished_answer_aborts_nothing(live: LiveServer, stream: bool) -> None:
    """Closing right after the last byte, and right before it: never an abort of what finished."""
    aborted, finished = len(live.engine.aborted), len(live.engine.finished)
    for _ in range(20):
        with closing(post(live, "/v1/chat/completions", chat("plain", stream=stream))) as sock:
            received = b""
            while b"stop" not in received:
                received += sock.recv(65536)
    wait(live, lambda: len(live.engine.finished) == finished + 20)
    assert len(live.engine.aborted) == aborted


def test_a_client_that_leaves_in_its_body_disturbs_nobody(live: LiveServer) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=5)) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{")
    next_request_works(live)


def test_abort_request_ends_an_answer_with_what_there_is(live: LiveServer) -> None:
    stop = gate(live, "abort-after")
    aborted = len(live.engine.aborted)

    async def both() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(base_url=live.url) as client:
            body = {"text": "abort-after", "rid": "r-1"}
            pending = asyncio.create_task(client.post("/generate", json=body))
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_wait(stop), live.loop))
            said = await client.post("/abort_request", json={"rid": "r-1"})
            return said, await pending

    said, answer = asyncio.run(both())
    assert said.json() == {"aborted": 1}
    document = answer.json()
    assert document["text"] == "first"
    assert document["meta_info"]["finish_reason"] == {"type": "abort"}
    assert document["meta_info"]["completion_tokens"] == len("first")
    wait(live, lambda: len(live.engine.aborted) == aborted + 1)
    unknown = httpx.post(f"{live.url}/abort_request", json={"rid": "r-1"})
    assert unknown.status_code == 404
    next_request_works(live)


async def _wait(stop: Gate) -> None:
    await stop.reached.wait()


def test_an_abort_by_the_engine_keeps_the_counts() -> None:
    """Draining cuts answers with a bare ABORT chunk; usage must still be that of the answer."""

    def cut(request: TextRequest) -> Iterable[Step]:
        return ["ab", TextChunk(finish=FinishReason.ABORT)]

    with LiveServer(cut) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=completion("hello")).json()
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 2)
