"""Models without weights: functions from everything read to the next token.

`hash_model` mixes every id before the next one, so one wrong, missing or swapped token anywhere
in the context changes the continuation from there on: what a real model shows only as a drift.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from phloem.core.request import SamplingParams
from phloem.core.tokens import TOKEN_BYTES, tokens_from_bytes, tokens_to_bytes

__all__ = ["NextToken", "choose", "cold", "hash_model", "scripted_model"]

# (packed ids of the whole context, which try: 0 unless earlier ones were banned) -> next id
NextToken: TypeAlias = Callable[[bytes, int], int]


def hash_model(vocab_size: int) -> NextToken:
    """The next id is a checksum of all ids before it."""

    def next_token(context: bytes, attempt: int) -> int:
        return zlib.crc32(attempt.to_bytes(4, "little"), zlib.crc32(context)) % vocab_size

    return next_token


def scripted_model(answers: Mapping[bytes, Sequence[int]], *, after: int = 0) -> NextToken:
    """Emits given ids: `answers` maps a prompt (packed) to its answer; then `after` for ever."""
    by_length = sorted(answers, key=len, reverse=True)

    def next_token(context: bytes, attempt: int) -> int:  # noqa: ARG001 - a script has no second try
        for prompt in by_length:
            if context.startswith(prompt):
                index = (len(context) - len(prompt)) // TOKEN_BYTES
                answer = answers[prompt]
                return answer[index] if index < len(answer) else after
        return after

    return next_token


def choose(
    model: NextToken, context: bytes, *, index: int, min_tokens: int, stop_ids: Sequence[int]
) -> int:
    """Output number `index`; stop ids are banned before output number `min_tokens`."""
    token = model(context, 0)
    attempt = 0
    while index < min_tokens and token in stop_ids:
        attempt += 1
        token = model(context, attempt)
    return token


def cold(
    model: NextToken, tokens: bytes, sampling: SamplingParams, *, eos_ids: Sequence[int] = ()
) -> list[int]:
    """The expected answer: one request, no cache, no chunks, no pages at all."""
    stop_ids = (() if sampling.ignore_eos else tuple(eos_ids)) + sampling.stop_token_ids
    context = tokens
    for index in range(sampling.max_tokens):
        token = choose(
            model, context, index=index, min_tokens=sampling.min_tokens, stop_ids=stop_ids
        )
        context += tokens_to_bytes([token])
        if token in stop_ids and index >= sampling.min_tokens:
            break
    return [int(token) for token in tokens_from_bytes(context[len(tokens) :])]
