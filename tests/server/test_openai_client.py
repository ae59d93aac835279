"""The official client, over a real socket: it parses our answers and types our errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import openai
import pytest

from phloem.core.errors import EngineDead, Overloaded
from phloem.core.request import FinishReason
from phloem.engine.api import TextChunk, TextRequest
from phloem.server import ServerSettings
from tests.server.fake_engine import EOS, Step, ids_of, letters
from tests.server.live import LiveServer

KEY = "sk-test"


def script(request: TextRequest) -> Iterable[Step]:
    """The prompt chooses what happens."""
    text = bytes(i for i in ids_of(request) if i < 256).decode("utf-8", "replace")
    if "overloaded" in text:
        return [Overloaded("the queue is full", code="queue_full")]
    if "die late" in text:
        return ["a", EngineDead("killed by a signal")]
    if "die" in text:
        return [EngineDead("killed by a signal")]
    if "fail" in text:
        return ["a", TextChunk(finish=FinishReason.ERROR, error="the logits are NaN")]
    if "crash" in text:
        return [ZeroDivisionError("a bug")]
    if "emoji" in text:
        return [b"\xf0\x9f", TextChunk(text="\U0001f331", tokens=(140, 177)), "!"]
    return letters(request)


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    settings = ServerSettings(served_model_names=("fake", "org/alias"), api_key=KEY)
    with LiveServer(script, settings) as server:
        yield server


@pytest.fixture
def client(live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0)


def ask(client: openai.OpenAI, text: str, **fields: object) -> object:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="fake", messages=messages, **fields)


def test_chat(client: openai.OpenAI) -> None:
    answer = ask(client, "hi", max_tokens=5)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("abcde", "length")
    assert choice.message.role == "assistant"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (18, 5, 23)
    assert usage.prompt_tokens_details.cached_tokens == 3
    split = usage.prompt_tokens_details.cached_tokens_details
    assert split == {"device": 2, "remote": 0, "host": 1, "storage": 0, "computed": 15}
    assert sum(split.values()) == usage.prompt_tokens


def test_chat_stream_says_the_same_as_the_whole_answer(client: openai.OpenAI) -> None:
    whole = ask(client, "emoji", max_tokens=8)
    chunks = list(ask(client, "emoji", max_tokens=8, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content == "\U0001f331!"
    reasons = [c.choices[0].finish_reason for c in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-1].choices[0].stop_reason == EOS
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    """The client's own accumulator needs well-formed deltas."""
    messages = [{"role": "user", "content": "emoji"}]
    with client.chat.completions.stream(
        model="fake", messages=messages, max_tokens=9, stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == "\U0001f331!"
    assert final.usage.completion_tokens == 5


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = ask(client, "hi", max_tokens=2, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [(e.token, e.bytes, e.logprob) for e in content] == [
        ("a", [97], -0.5),
        ("b", [98], -0.5),
    ]
    assert [t.token for t in content[0].top_logprobs] == ["a", "b"]
    chunks = ask(client, "hi", max_tokens=2, logprobs=True, top_logprobs=2, stream=True)
    streamed = [e for c in chunks for e in (c.choices[0].logprobs or _Empty).content]
    assert streamed == content


class _Empty:
    content: tuple[()] = ()


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hello", max_tokens=3, logprobs=2)
    assert answer.choices[0].text == "abc"
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}


def test_completions_default_to_16_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=[1, 2, 3])
    assert answer.usage.completion_tokens == 16
    assert answer.usage.prompt_tokens == 3


@pytest.mark.parametrize("prompt", [["a", "bc"], [[1], [2, 3]]])
def test_several_prompts(client: openai.OpenAI, prompt: list[object]) -> None:
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "ab"), (1, "ab")]
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 4
    chunks = list(client.completions.create(model="fake", prompt=prompt, max_tokens=2, stream=True))
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(c.text for c in mine) == "ab"
        assert [c.finish_reason for c in mine][-1] == "length"


def test_sampling_fields_reach_the_engine(live: LiveServer, client: openai.OpenAI) -> None:
    extra = {
        "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2,
        "stop_token_ids": [7], "ignore_eos": True, "skip_special_tokens": False,
        "cache_salt": "tenant", "routing_key": "route", "priority": -3, "request_id": "mine",
    }  # fmt: skip
    answer = ask(
        client, "hi", max_completion_tokens=9, temperature=0.5, top_p=0.9, seed=11,
        stop=["X", "Y"], logit_bias={"65": -5}, presence_penalty=1, frequency_penalty=-1,
        extra_body=extra,
    )  # fmt: skip
    assert answer.id == "chatcmpl-mine"
    request = live.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k) == (9, 2, 0)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.9, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert (sampling.repetition_penalty, sampling.seed) == (1.1, 11)
    assert (sampling.stop, sampling.stop_token_ids) == (("X", "Y"), (7,))
    assert (sampling.logit_bias, sampling.ignore_eos) == (((65, -5.0),), True)
    assert (request.cache_salt, request.routing_key, request.priority) == ("tenant", "route", -3)
    assert (request.request_id, request.skip_special_tokens) == ("mine", False)


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["fake", "org/alias"]
    assert client.models.retrieve("org/alias").id == "org/alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_errors_are_typed(client: openai.OpenAI, live: LiveServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError, match="not served") as missing:
        client.chat.completions.create(model="gpt-4", messages=messages)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="context is 256") as long:
        ask(client, "x" * 230, max_tokens=16)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature") as hot:
        ask(client, "hi", temperature=-1)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0).models.list()


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("overloaded", 503, "queue_full"),
        ("die", 503, "engine_dead"),
        ("fail", 500, "request_failed"),
        ("crash", 500, "internal_error"),
    ],
)
def test_failures_before_the_first_byte_have_a_status(
    client: openai.OpenAI, text: str, status: int, code: str
) -> None:
    for stream in (False, True):
        if stream and text == "fail":
            continue  # it fails after its first token: see the next test
        with pytest.raises(openai.InternalServerError) as error:
            ask(client, text, stream=stream)
        assert (error.value.status_code, error.value.code) == (status, code)
        assert "Traceback" not in str(error.value)
        assert "a bug" not in str(error.value)
    assert ask(client, "hi", max_tokens=1).choices[0].message.content == "a"


@pytest.mark.parametrize(
    ("text", "said"), [("fail", "the logits are NaN"), ("die late", "killed by a signal")]
)
def test_failures_in_mid_stream_end_the_stream(client: openai.OpenAI, text: str, said: str) -> None:
    got: list[str | None] = []

    def read() -> None:
        got.extend(chunk.choices[0].delta.content for chunk in ask(client, text, stream=True))

    with pytest.raises(openai.APIError, match=said):
        read()
    assert got == ["", "a"]
