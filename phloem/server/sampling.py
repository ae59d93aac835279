"""From a checked body to SamplingParams and a TextRequest that fits the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from phloem.core.errors import BadRequest
from phloem.core.request import SamplingParams
from phloem.core.tokens import num_tokens
from phloem.engine.api import ModelCard
from phloem.server.fields import SamplingBody

Number = TypeVar("Number", int, float)

__all__ = ["check_length", "make_sampling", "room_for"]


def room_for(tokens: bytes, card: ModelCard, *, source: str) -> int:
    """The longest completion that this prompt can have. Raises BadRequest if there is none."""
    prompt = num_tokens(tokens)
    if prompt >= card.max_model_len:
        raise BadRequest(
            f"the prompt has {prompt} tokens, and the model's context of {card.max_model_len} "
            "tokens must hold it and at least one token of completion",
            param=source,
            code="context_length_exceeded",
        )
    # A pool smaller than the context bounds what an unlimited answer may ask for; the last token
    # sampled is never computed, so it needs no place.
    pool = card.num_pages * card.page_size + 1
    return max(1, min(card.max_model_len, pool) - prompt)


def check_length(
    tokens: bytes, max_tokens: int, card: ModelCard, *, source: str, name: str
) -> None:
    """Raise BadRequest if prompt (from field `source`) and completion exceed the context."""
    prompt = num_tokens(tokens)
    room_for(tokens, card, source=source)
    if prompt + max_tokens > card.max_model_len:
        raise BadRequest(
            f"the model's context is {card.max_model_len} tokens, but the request asks for "
            f"{prompt + max_tokens}: {prompt} of prompt and {max_tokens} of completion ({name})",
            param=name,
            code="context_length_exceeded",
        )


def _ids_in_vocabulary(name: str, ids: list[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"{name}: {token} is outside the vocabulary of {vocab_size} ids", param=name
            )


def _bias(entries: dict[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, bias in entries.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 10):
            raise BadRequest(
                f"logit_bias: keys must be token ids, got {key!r:.60}", param="logit_bias"
            )
        pairs.append((int(key), bias))
    return tuple(pairs)


def _given(value: Number | None, default: Number) -> Number:
    """What the request says, else what the model recommends."""
    return default if value is None else value


def make_sampling(
    body: SamplingBody,
    card: ModelCard,
    *,
    max_tokens: int,
    logprobs: int | None,
    names: Mapping[str, str],
) -> SamplingParams:
    """Raises BadRequest for values out of range or outside the vocabulary.

    `names`: what the caller calls those fields that SamplingParams calls otherwise.
    """
    try:
        return _sampling(body, card, max_tokens=max_tokens, logprobs=logprobs)
    except BadRequest as error:
        theirs = names.get(error.param or "")
        if error.param is None or theirs is None:
            raise
        rest = error.message.removeprefix(error.param)
        raise BadRequest(theirs + rest, param=theirs, code=error.code) from None


def _sampling(
    body: SamplingBody, card: ModelCard, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    bias = _bias(body.logit_bias)
    _ids_in_vocabulary("logit_bias", [token for token, _ in bias], card.vocab_size)
    _ids_in_vocabulary("stop_token_ids", body.stop_token_ids, card.vocab_size)
    own = card.sampling
    top_k = _given(body.top_k, own.top_k)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=_given(body.temperature, own.temperature),
        top_p=_given(body.top_p, own.top_p),
        top_k=0 if top_k == -1 else top_k,  # -1: how others spell "off"
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=_given(body.repetition_penalty, own.repetition_penalty),
        logit_bias=bias,
        seed=body.seed,
        logprobs=logprobs,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
    )
