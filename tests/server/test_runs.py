"""Many requests at once: unique ids for the engine, a sure end for each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import httpx
import pytest

from phloem.core.errors import EngineDead
from phloem.core.request import FinishReason
from phloem.engine.api import TextChunk, TextRequest
from tests.server.fake_engine import FakeEngine, Gate, Step, ids_of, letters
from tests.server.http import client, completion
from tests.server.live import LiveServer


async def test_one_request_id_used_twice_at_once_is_two_requests() -> None:
    gate = Gate()
    engine = FakeEngine(lambda _: [gate, "a"])
    async with client(engine) as http:
        body = completion(request_id="same")
        both = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2)]
        await engine.until(lambda: len(engine.running) == 2)
        gate.opened.set()
        answers = await asyncio.gather(*both)
    assert [a.headers["x-request-id"] for a in answers] == ["same", "same"]
    assert len({r.request_id for r in engine.requests}) == 2


async def test_one_failed_prompt_of_several_ends_the_others() -> None:
    gates = [Gate(), Gate()]

    def script(request: TextRequest) -> Iterable[Step]:
        first = ids_of(request)[0]
        return [gates[0], ValueError("boom")] if first == 0 else ["a", gates[1]]

    for stream in (False, True):
        gates[:] = [Gate(), Gate()]
        engine = FakeEngine(script)
        async with client(engine) as http:
            body = completion([[0], [1], [2]], stream=stream)
            pending = asyncio.create_task(http.post("/v1/completions", json=body))
            await engine.until(lambda: len(engine.running) == 3)  # noqa: B023
            gates[0].opened.set()
            answer = await pending
        assert "internal_error" in answer.text
        assert (len(engine.failed), len(engine.aborted)) == (1, 2)
        assert engine.running == set()


async def test_an_answer_without_an_end_is_an_error_not_a_short_answer() -> None:
    class Broken(FakeEngine):
        async def generate(self, request: TextRequest):  # type: ignore[no-untyped-def]
            yield TextChunk(text="half", tokens=(1,))

    async with client(Broken()) as http:
        answer = await http.post("/v1/completions", json=completion())
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_dead"


async def test_a_failed_row_is_a_500_with_its_reason() -> None:
    engine = FakeEngine(lambda _: [TextChunk(finish=FinishReason.ERROR, error="NaN in layer 3")])
    async with client(engine) as http:
        answer = await http.post("/v1/completions", json=completion())
    assert answer.status_code == 500
    assert "NaN in layer 3" in answer.json()["error"]["message"]


async def test_a_dead_engine_is_a_503_everywhere() -> None:
    engine = FakeEngine(lambda _: [EngineDead("killed")])
    async with client(engine) as http:
        for path, body in (("/v1/completions", completion()), ("/generate", {"text": "a"})):
            for stream in (False, True):
                answer = await http.post(path, json={**body, "stream": stream})
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "engine_dead"


@pytest.mark.parametrize("seed", range(2))
def test_200_parallel_requests_with_random_aborts(seed: int) -> None:
    """All that stay get their whole answer, all that leave are aborted, nothing is left behind."""
    rng = random.Random(seed)
    plans = [(rng.randint(1, 60), rng.random() < 0.4, rng.randint(0, 3)) for _ in range(200)]

    async def one(http: httpx.AsyncClient, tokens: int, leaves: bool, after: int) -> str | None:
        body = completion("x" * rng.randint(1, 50), max_tokens=tokens, stream=True)
        text = ""
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for piece in answer.aiter_text():
                text += piece
                if leaves and text.count("data: ") > after:
                    return None
        return text

    async def all_of_them(url: str) -> list[str | None]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as http:
            return await asyncio.gather(*(one(http, *plan) for plan in plans))

    with LiveServer(letters) as live:
        texts = asyncio.run(all_of_them(live.url))
        live.call(lambda: live.engine.until(lambda: not live.engine.running))
        engine = live.engine
    for (tokens, _, _), text in zip(plans, texts, strict=True):
        if text is not None:
            assert text.endswith("data: [DONE]\n\n")
            assert text.count('"text":"') == tokens + 1
    stayed = sum(text is not None for text in texts)
    assert len(engine.finished) + len(engine.aborted) == 200
    assert len(engine.finished) >= stayed > 100
