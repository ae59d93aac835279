"""O-36 e and f at the HTTP level: budgets at the edge of the context, usage and finish reasons."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from phloem.engine.api import SamplingDefaults
from tests.server.fake_engine import CONTEXT, FakeEngine
from tests.server.http import chat, client, completion, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("prompt", "budget"), [(1, 1), (5, 1), (CONTEXT - 1, 1), (CONTEXT - 16, 16), (1, CONTEXT - 1)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_o36_e_budgets_that_just_fit(prompt: int, budget: int, stream: bool) -> None:
    body = completion([1] * prompt, max_tokens=budget, stream=stream)
    async with client(FakeEngine()) as http:
        answer = await http.post(TEXT, json=body)
    assert answer.status_code == 200, answer.text
    if stream:
        *chunks, done = events(answer.text)
        assert done == "[DONE]"
        choices = [chunk["choices"][0] for chunk in chunks]
        assert len("".join(choice["text"] for choice in choices)) == budget
        assert choices[-1]["finish_reason"] == "length"
    else:
        document = answer.json()
        assert document["usage"]["completion_tokens"] == budget
        assert document["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("over", [0, 1, 100])
@pytest.mark.parametrize("stream", [False, True])
async def test_o36_e_a_prompt_that_fills_the_context_is_refused(over: int, stream: bool) -> None:
    body = completion([1] * (CONTEXT + over), max_tokens=1, stream=stream)
    async with client(FakeEngine()) as http:
        answer = await http.post(TEXT, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT + over) in error["message"]
    assert str(CONTEXT) in error["message"]


async def test_o36_e_a_chat_without_a_budget_has_the_rest_of_the_context() -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        answer = await http.post(CHAT, json=chat("hello"))
    usage = answer.json()["usage"]
    assert usage["total_tokens"] == CONTEXT
    assert engine.requests[0].sampling.max_tokens == CONTEXT - usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat(max_tokens=4)), (TEXT, completion(max_tokens=4))]
)
async def test_o36_f_usage_comes_once_and_last(path: str, body: dict[str, Any]) -> None:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client(FakeEngine()) as http:
        with_usage = events((await http.post(path, json=asked)).text)
        without = events((await http.post(path, json={**body, "stream": True})).text)
        whole = (await http.post(path, json=body)).json()
    *chunks, last, done = with_usage
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    for stream in (chunks, without[:-1]):
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in stream]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in without[:-1])


@pytest.mark.parametrize(
    ("said", "expected"),
    [({}, (0.3, 0.8)), ({"temperature": 1.0}, (1.0, 0.8)), ({"top_p": None}, (0.3, 0.8))],
)
async def test_what_a_request_does_not_say_is_what_the_model_recommends(
    said: dict[str, Any], expected: tuple[float, float]
) -> None:
    engine = FakeEngine()
    engine.card = dataclasses.replace(
        engine.card, sampling=SamplingDefaults(temperature=0.3, top_p=0.8)
    )
    async with client(engine) as http:
        assert (await http.post(CHAT, json=chat("hi", **said))).status_code == 200
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p) == expected


async def test_usage_sums_over_several_prompts() -> None:
    body = completion([[1], [2, 3], [4] * 9], max_tokens=2, stream=True)
    asked = {**body, "stream_options": {"include_usage": True}}
    async with client(FakeEngine()) as http:
        usage = events((await http.post(TEXT, json=asked)).text)[-2]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (12, 6)
    split = usage["prompt_tokens_details"]["cached_tokens_details"]
    assert sum(split.values()) == 12
    assert usage["prompt_tokens_details"]["cached_tokens"] == 12 - split["computed"]
