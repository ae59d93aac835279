"""Shapes on the wire that only odd tokens reveal."""

from __future__ import annotations

import json
import math

import msgspec

from phloem.core.request import CachedTokens
from phloem.engine.api import TextChunk, TextLogprob
from phloem.server.wire import CompletionLogprobs, chat_logprobs, usage_of


def entry(raw: bytes, logprob: float = -1.0, top: tuple[TextLogprob, ...] = ()) -> TextLogprob:
    return TextLogprob(raw[0], raw.decode("utf-8", "replace"), raw, logprob, top)


def test_halves_of_a_character_stay_apart_and_offsets_count_characters() -> None:
    halves = (entry(b"\xf0\x9f"), entry(b"\x8c\xb1"), entry(b"ab"), entry(b"!"))
    whole = CompletionLogprobs().render(halves)
    assert whole["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\x8c\\xb1", "ab", "!"]
    assert whole["text_offset"] == [0, 0, 1, 3]
    renderer = CompletionLogprobs()
    parts = [renderer.render([half]) for half in halves]
    assert [offset for part in parts for offset in part["text_offset"]] == whole["text_offset"]


def test_alternatives_that_look_alike_keep_their_own_keys() -> None:
    top = (entry(b"\xf0"), entry(b"\xf1"))
    rendered = CompletionLogprobs().render([entry(b"\xf0", top=top)])
    assert len(rendered["top_logprobs"][0]) == 2


def test_impossible_tokens_have_a_number_that_json_can_carry() -> None:
    entries = [entry(b"a", -math.inf, (entry(b"b", math.nan),))]
    document = json.loads(msgspec.json.encode(chat_logprobs(entries)))
    assert document["content"][0]["logprob"] == -9999.0
    assert document["content"][0]["top_logprobs"][0]["logprob"] == -9999.0


def test_usage_adds_up() -> None:
    ends = [
        TextChunk(prompt_tokens=10, completion_tokens=3, cached=CachedTokens(device=4, storage=2)),
        TextChunk(prompt_tokens=5, completion_tokens=1, cached=CachedTokens(remote=1, host=2)),
    ]
    assert usage_of(ends) == {
        "prompt_tokens": 15,
        "completion_tokens": 4,
        "total_tokens": 19,
        "prompt_tokens_details": {
            "cached_tokens": 9,
            "cached_tokens_details": {
                "device": 4,
                "remote": 1,
                "host": 2,
                "storage": 2,
                "computed": 6,
            },
        },
    }
