"""POST /generate in its shape: ids and text, one or several, whole or streamed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.fake_engine import EOS, FakeEngine, ids_of
from tests.server.http import client, events


async def post(engine: FakeEngine, **body: Any) -> Any:
    async with client(engine) as http:
        answer = await http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return events(answer.text) if body.get("stream") else answer.json()


async def test_ids_in_ids_out() -> None:
    engine = FakeEngine()
    document = await post(
        engine, input_ids=[1, 2, 3, 4], rid="r", sampling_params={"max_new_tokens": 3}
    )
    assert document["text"] == "abc"
    assert document["output_ids"] == [97, 98, 99]
    meta = document["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "r", "finish_reason": {"type": "length", "length": 3}, "prompt_tokens": 4,
        "completion_tokens": 3, "cached_tokens": 3,
        "cached_tokens_details": {
            "device": 2, "remote": 0, "host": 1, "storage": 0, "computed": 1
        },
    }  # fmt: skip
    assert ids_of(engine.requests[0]) == [1, 2, 3, 4]


async def test_text_in_and_the_defaults() -> None:
    engine = FakeEngine(lambda _: ["ok"])
    document = await post(engine, text="hi", cache_salt="s", routing_key="r", priority=2)
    assert document["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    request = engine.requests[0]
    assert ids_of(request) == [104, 105]
    assert request.sampling.max_tokens == 128
    assert (request.cache_salt, request.routing_key, request.priority) == ("s", "r", 2)


async def test_sglang_names_of_sampling_fields() -> None:
    engine = FakeEngine()
    params = {"max_new_tokens": 5, "min_new_tokens": 2, "sampling_seed": 7, "top_k": -1}
    await post(engine, text="a", sampling_params=params)
    sampling = engine.requests[0].sampling
    assert (sampling.min_tokens, sampling.seed, sampling.top_k) == (2, 7, 0)


@pytest.mark.parametrize(
    "prompts", [{"input_ids": [[1], [2, 3]]}, {"text": ["a", "bc"]}], ids=["ids", "text"]
)
async def test_arrays_answer_with_arrays(prompts: dict[str, Any]) -> None:
    params = {"max_new_tokens": 2}
    documents = await post(FakeEngine(), **prompts, sampling_params=params)
    assert [d["meta_info"]["prompt_tokens"] for d in documents] == [1, 2]
    assert [d["text"] for d in documents] == ["ab", "ab"]
    single = await post(FakeEngine(), input_ids=[[1]], sampling_params=params)
    assert isinstance(single, list)
    streamed = await post(FakeEngine(), **prompts, sampling_params=params, stream=True)
    last = {d["index"]: d for d in streamed[:-1]}
    assert [last[i]["output_ids"] for i in (0, 1)] == [[97, 98], [97, 98]]


async def test_streams_hold_all_so_far_or_what_is_new() -> None:
    params = {"max_new_tokens": 3}
    whole = await post(FakeEngine(), text="x", sampling_params=params, stream=True)
    new = await post(FakeEngine(), text="x", sampling_params=params, stream=True, incremental=True)
    assert whole[-1] == new[-1] == "[DONE]"
    assert [d["text"] for d in whole[:-1]] == ["a", "ab", "abc", "abc"]
    assert "".join(d["text"] for d in new[:-1]) == "abc"
    assert [i for d in new[:-1] for i in d["output_ids"]] == whole[-2]["output_ids"]
    assert whole[-2]["meta_info"]["finish_reason"]["type"] == "length"


async def test_logprobs() -> None:
    document = await post(
        FakeEngine(),
        text="x",
        return_logprob=True,
        top_logprobs_num=2,
        sampling_params={"max_new_tokens": 2},
    )
    meta = document["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 97, "a"], [-0.5, 98, "b"]]
    assert meta["output_top_logprobs"][0] == [[-0.5, 97, "a"], [-1.5, 98, "b"]]
