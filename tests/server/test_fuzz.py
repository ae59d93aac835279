"""Mutated and random bodies: never a 5xx, never a hang, and the server lives on."""

from __future__ import annotations

import asyncio
import json
import random
import string
from typing import Any

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.http import chat, client, completion

SEEDS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        chat(
            max_tokens=3, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=1, stop=["a", "b"],
            stop_token_ids=[3], logit_bias={"5": 1.5}, logprobs=True, top_logprobs=2, stream=True,
            stream_options={"include_usage": True}, cache_salt="s", routing_key="r",
            request_id="id", priority=1, min_tokens=1, ignore_eos=True, presence_penalty=1.0,
            tools=[], response_format={"type": "text"}, n=1, max_completion_tokens=3,
        ),
    ),
    (
        "/v1/completions",
        completion(["ab", [1, 2]], max_tokens=2, logprobs=1, stream=False, echo=False, best_of=1),
    ),
    (
        "/generate",
        {
            "input_ids": [[1, 2], [3]], "stream": True, "rid": "x", "return_logprob": True,
            "top_logprobs_num": 1, "incremental": True,
            "sampling_params": {"max_new_tokens": 2, "stop": "x", "temperature": 0, "n": 1},
        },
    ),
    ("/tokenize", {"model": "fake", "prompt": "hi", "add_special_tokens": True}),
    ("/v1/detokenize", {"tokens": [1, 2, 3], "skip_special_tokens": False}),
    ("/abort_request", {"rid": "nobody"}),
]  # fmt: skip

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 255, 300, 2**31, -(2**31), 2**63, 2**64, 10**30, 0.0, -0.5,
    1e308, -1e308, "", "a", "\x00", "\u2028", "\U0001f331", "x" * 5000, "5", "null", [], [[]], {},
    [None], [1, "a"], {"": None}, {"type": "text"}, [{"role": "user", "content": "x"}], ["a"] * 70,
]  # fmt: skip


def mutate(value: Any, rng: random.Random) -> Any:
    """A copy with one place changed."""
    roll = rng.random()
    if isinstance(value, dict) and value and roll < 0.85:
        key = rng.choice(list(value))
        changed = dict(value)
        if roll < 0.1:
            del changed[key]
        elif roll < 0.2:
            changed[rng.choice(string.ascii_letters) * rng.randint(0, 9)] = rng.choice(ODD)
        else:
            changed[key] = mutate(value[key], rng)
        return changed
    if isinstance(value, list) and value and roll < 0.7:
        at = rng.randrange(len(value))
        tail = [mutate(value[at], rng), *value[at + 1 :]]
        return value[:at] + (tail * rng.randint(0, 2) if roll < 0.2 else tail)
    return rng.choice(ODD)


def spoil(data: bytes, rng: random.Random) -> bytes:
    """Bytes that are perhaps no JSON any more."""
    spoiled = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(spoiled))
        choice = rng.random()
        if choice < 0.4:
            spoiled[at] = rng.randrange(256)
        elif choice < 0.7:
            del spoiled[at : at + rng.randint(1, 20)]
        else:
            spoiled[at:at] = rng.choice([b"NaN", b"\xff", b"[", b"}", b"1e999", b'\\ud800"', b","])
        spoiled = spoiled or bytearray(b"x")
    return bytes(spoiled)


@pytest.mark.parametrize("seed", range(6))
async def test_mutated_bodies_never_break_the_server(seed: int) -> None:
    rng = random.Random(seed)
    engine = FakeEngine()
    statuses = set()
    async with client(engine) as http:
        for _ in range(250):
            path, body = rng.choice(SEEDS)
            for _ in range(rng.randint(1, 3)):
                body = mutate(body, rng)
            data = json.dumps(body).encode()
            if rng.random() < 0.3:
                data = spoil(data, rng)
            async with asyncio.timeout(10):
                answer = await http.post(path, content=data)
            assert answer.status_code < 500, (path, data[:2000], answer.text)
            assert answer.headers["x-request-id"]
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"]
            statuses.add(answer.status_code)
        good = await http.post("/v1/completions", json=completion(max_tokens=1))
    assert good.status_code == 200
    assert {200, 400, 422} <= statuses, "the fuzz must reach both sides"
    assert engine.running == set()
    assert engine.aborted == []
