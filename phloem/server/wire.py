"""The shapes that answers have on the wire."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from phloem.core.request import CachedTokens
from phloem.engine.api import TextChunk, TextLogprob

__all__ = ["CompletionLogprobs", "cached_split", "chat_logprobs", "finite_logprob", "usage_of"]

_MIN_LOGPROB = -9999.0  # JSON has no -inf; OpenAI writes this


def finite_logprob(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return logprob if logprob > _MIN_LOGPROB else _MIN_LOGPROB  # also for NaN


def cached_split(cached: CachedTokens, prompt_tokens: int) -> dict[str, int]:
    """Where the prompt's tokens came from; the five sum to the prompt."""
    return {
        "device": cached.device,
        "remote": cached.remote,
        "host": cached.host,
        "storage": cached.storage,
        "computed": prompt_tokens - cached.total,
    }


def usage_of(ends: Iterable[TextChunk]) -> dict[str, Any]:
    """`usage` of one answer, or the sum over several, from their last chunks."""
    ends = list(ends)
    prompt = sum(end.prompt_tokens for end in ends)
    completion = sum(end.completion_tokens for end in ends)
    cached = CachedTokens(
        device=sum(end.cached.device for end in ends),
        remote=sum(end.cached.remote for end in ends),
        host=sum(end.cached.host for end in ends),
        storage=sum(end.cached.storage for end in ends),
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": cached.total,
            "cached_tokens_details": cached_split(cached, prompt),
        },
    }


def _chat_entry(entry: TextLogprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": finite_logprob(entry.logprob), "bytes": list(entry.raw)}


def chat_logprobs(entries: Sequence[TextLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    return {
        "content": [
            {**_chat_entry(entry), "top_logprobs": [_chat_entry(top) for top in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def _key(entry: TextLogprob) -> str:
    # Distinct tokens need distinct keys, so bytes that are no text are spelled out.
    try:
        return entry.raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.raw)


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, chunk by chunk.

    `text_offset` counts characters from the start of the completion; a character split over
    tokens belongs to the token that ends it.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def render(self, entries: Sequence[TextLogprob]) -> dict[str, Any]:
        """The next tokens."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(entry.raw))
        return {
            "tokens": [_key(entry) for entry in entries],
            "token_logprobs": [finite_logprob(entry.logprob) for entry in entries],
            "top_logprobs": [
                {_key(top): finite_logprob(top.logprob) for top in entry.top} for entry in entries
            ],
            "text_offset": offsets,
        }
