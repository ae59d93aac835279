"""Bad input has a 4xx that names the field, in OpenAI's shape, and hurts no other request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phloem.server import ServerSettings
from tests.server.fake_engine import CONTEXT, VOCAB, FakeEngine
from tests.server.http import chat, client, completion

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def message(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [fields]}


def native(**fields: Any) -> dict[str, Any]:
    return {"input_ids": [1, 2], **fields}


def sampled(**fields: Any) -> dict[str, Any]:
    return native(sampling_params=fields)


# path, body (bytes go as they are), status, a piece of the message, param
ROWS: list[tuple[str, Any, int, str, str | None]] = [
    # No JSON, or no object.
    (CHAT, b"", 422, "not valid JSON", None),
    (CHAT, b"{", 422, "not valid JSON", None),
    (CHAT, b"\x00", 422, "not valid JSON", None),
    (CHAT, b'{"model": "fake"} x', 422, "not valid JSON", None),
    (CHAT, b'{"prompt": "\xff\xfe"}', 422, "UTF-8", None),
    (CHAT, b'{"prompt": "\\ud800"}', 422, "not valid JSON", None),
    (CHAT, b'{"temperature": NaN}', 422, "not valid JSON", None),
    (CHAT, b'{"temperature": Infinity}', 422, "not valid JSON", None),
    (CHAT, b'{"temperature": 1e999}', 422, "not valid JSON", None),
    (CHAT, b"[" * 100_000, 422, "nested too deeply", None),
    (CHAT, b'{"messages":' + b"[" * 100_000, 422, "nested too deeply", None),
    (CHAT, b"[]", 400, "JSON object, got an array", None),
    (CHAT, b"null", 400, "JSON object, got null", None),
    (CHAT, b"true", 400, "JSON object, got a boolean", None),
    (CHAT, b"3.5", 400, "JSON object, got a number", None),
    (CHAT, b'"hi"', 400, "JSON object, got a string", None),
    # Messages.
    (CHAT, {"model": "fake"}, 400, "messages is required", "messages"),
    (CHAT, {"model": "fake", "messages": None}, 400, "messages is required", "messages"),
    (CHAT, {"model": "fake", "messages": []}, 400, "messages is empty", "messages"),
    (CHAT, {"model": "fake", "messages": "hi"}, 400, "array of messages", "messages"),
    (CHAT, {"model": "fake", "messages": {"0": USER}}, 400, "array of messages", "messages"),
    (CHAT, {"model": "fake", "messages": ["hi"]}, 400, "must be an object", "messages[0]"),
    (CHAT, {"model": "fake", "messages": [USER, None]}, 400, "must be an object", "messages[1]"),
    (CHAT, message(content="hi"), 400, "role must be one of", "messages[0].role"),
    (CHAT, message(role="robot", content="hi"), 400, "'robot'", "messages[0].role"),
    (CHAT, message(role=["user"], content="hi"), 400, "role must be", "messages[0].role"),
    (CHAT, message(role="tool", content="42"), 400, "not supported yet", "messages[0]"),
    (CHAT, message(role="user"), 400, "string or an array", "messages[0].content"),
    (CHAT, message(role="user", content=7), 400, "string or an array", "messages[0].content"),
    (CHAT, message(role="user", content=[7]), 400, "an object", "messages[0].content[0]"),
    (CHAT, message(role="user", content=[IMAGE]), 400, "'image_url'", "messages[0].content[0]"),
    (
        CHAT,
        message(role="user", content=[{"type": "text", "text": 1}]),
        400,
        "must be a string",
        "messages[0].content[0].text",
    ),
    (
        CHAT,
        message(role="assistant", content=None, tool_calls=[{"id": "x"}]),
        400,
        "tool calls are not supported yet",
        "messages[0]",
    ),
    (CHAT, chat("refuse the template"), 400, "template refuses", None),
    # Prompts.
    (TEXT, {"model": "fake"}, 400, "prompt is required", "prompt"),
    (TEXT, completion(""), 400, "prompt is empty", "prompt"),
    (TEXT, completion([]), 400, "prompt is empty", "prompt"),
    (TEXT, completion(["a", ""]), 400, "prompt[1] is empty", "prompt[1]"),
    (TEXT, completion([[1], []]), 400, "prompt[1] is empty", "prompt[1]"),
    (TEXT, completion(7), 400, "must be a string, an array", "prompt"),
    (TEXT, completion({"text": "hi"}), 400, "must be a string, an array", "prompt"),
    (TEXT, completion([1, "a"]), 400, "prompt[1] must be a token id", "prompt"),
    (TEXT, completion([1, True]), 400, "prompt[1] must be a token id", "prompt"),
    (TEXT, completion([1, 2.5]), 400, "prompt[1] must be a token id", "prompt"),
    (TEXT, completion([1.5]), 400, "a string or an array of token ids", "prompt[0]"),
    (TEXT, completion([[1], [None]]), 400, "prompt[1][0] must be a token id", "prompt[1]"),
    (TEXT, completion([-1]), 400, "outside the vocabulary", "prompt"),
    (TEXT, completion([VOCAB]), 400, f"prompt[0] is {VOCAB}, outside", "prompt"),
    (TEXT, completion([10**30]), 400, "outside the vocabulary", "prompt"),
    (TEXT, completion(["a"] * 257), 400, "more than 256", "prompt"),
    # Lengths (O-36 e).
    (TEXT, completion([1] * CONTEXT), 400, f"{CONTEXT} tokens", "prompt"),
    (TEXT, completion([1] * (CONTEXT + 1)), 400, f"{CONTEXT + 1} tokens", "prompt"),
    (TEXT, completion([1] * 5000), 400, "5000 tokens", "prompt"),
    (TEXT, completion([1], max_tokens=CONTEXT), 400, f"asks for {CONTEXT + 1}", "max_tokens"),
    (TEXT, completion([1], max_tokens=10**12), 400, "context is", "max_tokens"),
    (CHAT, chat(max_completion_tokens=999), 400, "context is", "max_completion_tokens"),
    # Budgets and ranges.
    (TEXT, completion(max_tokens=0), 400, "max_tokens", "max_tokens"),
    (TEXT, completion(max_tokens=-5), 400, "max_tokens", "max_tokens"),
    (TEXT, completion(min_tokens=-1), 400, "min_tokens", "min_tokens"),
    (TEXT, completion(max_tokens=2, min_tokens=3), 400, "min_tokens", "min_tokens"),
    (TEXT, completion(max_tokens=10**40), 400, "max_tokens", "max_tokens"),
    (CHAT, chat(temperature=-0.1), 400, "temperature", "temperature"),
    (CHAT, chat(temperature=1e9), 400, "temperature", "temperature"),
    (CHAT, chat(top_p=0), 400, "top_p", "top_p"),
    (CHAT, chat(top_p=1.5), 400, "top_p", "top_p"),
    (CHAT, chat(top_k=-2), 400, "top_k", "top_k"),
    (CHAT, chat(min_p=2), 400, "min_p", "min_p"),
    (CHAT, chat(presence_penalty=3), 400, "presence_penalty", "presence_penalty"),
    (CHAT, chat(frequency_penalty=-3), 400, "frequency_penalty", "frequency_penalty"),
    (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty", "repetition_penalty"),
    (CHAT, chat(seed=2**64), 400, "seed", "seed"),
    (CHAT, chat(priority=2**31), 400, "priority", "priority"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs must", "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=-1), 400, "logprobs", "top_logprobs"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs needs logprobs", "top_logprobs"),
    (TEXT, completion(logprobs=21), 400, "logprobs", "logprobs"),
    # Types.
    (CHAT, chat(max_tokens="5"), 400, "max_tokens: input should be a valid int", "max_tokens"),
    (CHAT, chat(max_tokens=5.5), 400, "max_tokens", "max_tokens"),
    (CHAT, chat(max_tokens=True), 400, "max_tokens", "max_tokens"),
    (CHAT, chat(max_tokens=[5]), 400, "max_tokens", "max_tokens"),
    (CHAT, chat(temperature="hot"), 400, "got 'hot'", "temperature"),
    (CHAT, chat(temperature=True), 400, "temperature", "temperature"),
    (CHAT, chat(stream="yes"), 400, "stream", "stream"),
    (CHAT, chat(stream=1), 400, "stream", "stream"),
    (CHAT, chat(logprobs=2), 400, "logprobs", "logprobs"),
    (TEXT, completion(logprobs=True), 400, "logprobs", "logprobs"),
    (CHAT, chat(seed="x"), 400, "seed", "seed"),
    (CHAT, chat(model=7), 400, "model", "model"),
    (CHAT, chat(cache_salt=7), 400, "cache_salt", "cache_salt"),
    (CHAT, chat(cache_salt="x" * 5000), 400, "cache_salt", "cache_salt"),
    (CHAT, chat(routing_key=["x"]), 400, "routing_key", "routing_key"),
    (CHAT, chat(request_id=1), 400, "request_id", "request_id"),
    (CHAT, chat(request_id=""), 400, "request_id must be", "request_id"),
    (CHAT, chat(request_id="a\r\nset-cookie: x"), 400, "request_id must be", "request_id"),
    (CHAT, chat(request_id="\u00e9"), 400, "request_id must be", "request_id"),
    # Stops and biases.
    (CHAT, chat(stop=7), 400, "stop", "stop"),
    (CHAT, chat(stop=[7]), 400, "stop[0]", "stop[0]"),
    (CHAT, chat(stop=""), 400, "stop", "stop"),
    (CHAT, chat(stop=["x"] * 65), 400, "at most 64", "stop"),
    (CHAT, chat(stop=["x"] * 200_000), 400, "at most 64", "stop"),
    (CHAT, chat(stop="x" * 5000), 400, "at most 4096", "stop"),
    (CHAT, chat(stop_token_ids=["x"]), 400, "stop_token_ids[0]", "stop_token_ids[0]"),
    (CHAT, chat(stop_token_ids=[VOCAB]), 400, "outside the vocabulary", "stop_token_ids"),
    (CHAT, chat(stop_token_ids=[1] * 5000), 400, "at most 1024", "stop_token_ids"),
    (CHAT, chat(logit_bias=[1]), 400, "logit_bias", "logit_bias"),
    (CHAT, chat(logit_bias={"x": 1}), 400, "keys must be token ids", "logit_bias"),
    (CHAT, chat(logit_bias={str(VOCAB): 1}), 400, "outside the vocabulary", "logit_bias"),
    (CHAT, chat(logit_bias={"-1": 1}), 400, "outside the vocabulary", "logit_bias"),
    (CHAT, chat(logit_bias={"1": 101}), 400, "between -100 and 100", "logit_bias"),
    (CHAT, chat(logit_bias={"1": "x"}), 400, "logit_bias.1", "logit_bias.1"),
    # Streams.
    (CHAT, chat(stream_options={"include_usage": True}), 400, "only with", "stream_options"),
    (CHAT, chat(stream=True, stream_options=[]), 400, "stream_options", "stream_options"),
    # Models.
    (CHAT, chat(model="gpt-4"), 404, "'gpt-4' is not served here; served: fake", "model"),
    (TEXT, completion(model=""), 404, "not served here", "model"),
    (NATIVE, native(model="gpt-4"), 404, "not served here", "model"),
    # Native.
    (NATIVE, {}, 400, "either text or input_ids", "input_ids"),
    (NATIVE, {"text": "a", "input_ids": [1]}, 400, "either text or input_ids", "input_ids"),
    (NATIVE, {"input_ids": "a"}, 400, "array of token ids", "input_ids"),
    (NATIVE, {"input_ids": ["a"]}, 400, "array of token ids", "input_ids"),
    (NATIVE, {"input_ids": []}, 400, "input_ids is empty", "input_ids"),
    (NATIVE, {"text": [1]}, 400, "array of strings", "text"),
    (NATIVE, {"text": 1}, 400, "must be a string", "text"),
    (NATIVE, native(sampling_params=[]), 400, "sampling_params", "sampling_params"),
    (NATIVE, sampled(max_new_tokens=-1), 400, "max_new_tokens", "max_new_tokens"),
    (NATIVE, sampled(max_new_tokens=9999), 400, "max_new_tokens", "max_new_tokens"),
    (NATIVE, sampled(n=2), 400, "not supported yet", "sampling_params.n"),
    (NATIVE, sampled(temperature="x"), 400, "temperature", "sampling_params.temperature"),
    (NATIVE, native(logprob_start_len=0), 400, "not supported yet", "logprob_start_len"),
    # Tokens.
    ("/tokenize", {}, 400, "either prompt or messages", "prompt"),
    ("/tokenize", {"prompt": 1}, 400, "prompt", "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, 400, "either prompt or", "prompt"),
    ("/detokenize", {}, 400, "array of token ids", "tokens"),
    ("/detokenize", {"tokens": [VOCAB]}, 400, "outside the vocabulary", "tokens"),
    ("/detokenize", {"tokens": ["a"]}, 400, "must be a token id", "tokens"),
    ("/abort_request", {}, 400, "rid is required", "rid"),
    # Paths.
    ("/v1/chat/completions/", chat(), 404, "no such endpoint", None),
    ("/v1/embeddings", {"input": "x"}, 404, "no such endpoint", None),
    ("/health", {}, 405, "method not allowed: POST /health", None),
]

UNSUPPORTED: list[tuple[str, Any]] = [
    ("n", 2), ("n", "x"), ("best_of", 2), ("echo", True), ("suffix", "x"),
    ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("functions", [{}]),
    ("response_format", {"type": "json_object"}), ("guided_json", {}), ("guided_regex", "a"),
    ("structured_outputs", {"regex": "a"}), ("regex", "["), ("ebnf", "root ::= x"),
    ("json_schema", "{}"), ("prompt_logprobs", 1), ("logits_processors", ["x"]),
    ("use_beam_search", True), ("truncate_prompt_tokens", 4), ("stop_regex", "a+"),
    ("chat_template", "x"), ("continue_final_message", True), ("bad_words", ["x"]),
    ("include_stop_str_in_output", True), ("modalities", ["audio"]), ("lora_path", "x"),
]  # fmt: skip


async def check(path: str, body: Any, status: int, said: str, param: str | None) -> None:
    engine = FakeEngine()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client(engine) as http:
        answer = await http.post(path, content=data)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert said in error["message"]
        assert error["param"] == param
        assert len(error["message"]) < 400
        assert engine.requests == [], "a refused request must not reach the engine"
        good = await http.post(CHAT, json=chat(max_tokens=1))
        assert good.json()["choices"][0]["message"]["content"] == "a"


@pytest.mark.parametrize(
    ("path", "body", "status", "said", "param"),
    ROWS,
    ids=[f"{i}-{row[4] or row[3]}" for i, row in enumerate(ROWS)],
)
async def test_bad_input(path: str, body: Any, status: int, said: str, param: str | None) -> None:
    await check(path, body, status, said, param)


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED, ids=[f"{n}={v}" for n, v in UNSUPPORTED])
async def test_what_would_change_the_answer_is_refused(name: str, value: Any) -> None:
    for path, body in ((CHAT, chat()), (TEXT, completion())):
        await check(path, {**body, name: value}, 400, f"{name} is not supported yet", name)


async def test_harmless_extras_and_nulls_are_ignored() -> None:
    extras = {
        "n": 1, "user": "me", "metadata": {}, "store": True, "service_tier": "auto", "tools": [],
        "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": False,
        "logit_bias": None, "stop": None, "max_tokens": None, "seed": None, "temperature": None,
        "stream": None, "stream_options": None, "best_of": None, "guided_json": None,
        "never_heard_of": [1, {"x": 2}], "reasoning_effort": "low", "echo": False,
    }  # fmt: skip
    async with client(FakeEngine()) as http:
        for path, body in ((CHAT, chat()), (TEXT, completion())):
            answer = await http.post(path, json={**body, **extras})
            assert answer.status_code == 200, answer.text


async def test_a_body_over_the_limit_is_413_and_is_not_read_on() -> None:
    engine = FakeEngine()
    settings = ServerSettings(max_body_bytes=1000)
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        for _ in range(100):
            sent += 500
            yield b"x" * 500

    async with client(engine, settings) as http:
        told = await http.post(CHAT, json=chat("x" * 2000))
        untold = await http.post(CHAT, content=endless())
        fine = await http.post(CHAT, json=chat(max_tokens=1))
    for answer in (told, untold):
        assert answer.status_code == 413
        assert "limit of 1000" in answer.json()["error"]["message"]
    assert sent < 3000
    assert fine.status_code == 200


async def test_405_says_what_is_allowed() -> None:
    async with client(FakeEngine()) as http:
        answer = await http.get(CHAT)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_needs_no_content_type() -> None:
    """`curl -d` sends a form's type; people mean JSON."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    async with client(FakeEngine()) as http:
        answer = await http.post(CHAT, content=json.dumps(chat(max_tokens=1)), headers=form)
    assert answer.status_code == 200
