"""What can be refused before a request reaches the engine."""

from __future__ import annotations

from phloem.core.errors import BadRequest
from phloem.core.tokens import TOKEN_BYTES, num_tokens, tokens_from_bytes
from phloem.engine.api import ModelCard, TextRequest
from phloem.kv.sizing import pages_for_tokens

__all__ = ["check_request"]


def check_request(request: TextRequest, card: ModelCard) -> None:
    """Raise BadRequest for what this model can never serve."""
    _check_prompt(request.tokens, card)
    sampling = request.sampling
    _check_length(num_tokens(request.tokens), sampling.max_tokens, card)
    for token, _ in sampling.logit_bias:
        _check_id(token, "logit_bias", card)
    for token in sampling.stop_token_ids:
        _check_id(token, "stop_token_ids", card)
    for text in sampling.stop:
        if not _is_unicode(text):
            raise BadRequest("a stop string is not valid Unicode (a lone surrogate)", param="stop")
    if request.cache_salt == "":
        raise BadRequest("cache_salt must not be empty; leave it out instead", param="cache_salt")


def _check_id(token: int, param: str, card: ModelCard) -> None:
    if not 0 <= token < card.vocab_size:
        raise BadRequest(
            f"{param}: token id {token} is outside the vocabulary (0 ... {card.vocab_size - 1})",
            param=param,
        )


def _check_prompt(tokens: bytes, card: ModelCard) -> None:
    if not tokens:
        raise BadRequest("the prompt is empty", param="prompt")
    if len(tokens) % TOKEN_BYTES:
        raise BadRequest(f"the prompt's {len(tokens)} bytes are no int32 tokens", param="prompt")
    ids = tokens_from_bytes(tokens)
    for extreme in (int(ids.min()), int(ids.max())):
        _check_id(extreme, "prompt", card)


def _check_length(num_prompt: int, max_tokens: int, card: ModelCard) -> None:
    if num_prompt + max_tokens > card.max_model_len:
        raise BadRequest(
            f"this model's context is {card.max_model_len} tokens, but {num_prompt + max_tokens} "
            f"were asked for ({num_prompt} of the prompt, {max_tokens} of the completion)",
            param="prompt" if num_prompt >= card.max_model_len else "max_tokens",
            code="context_length_exceeded",
        )
    # The last token sampled is never computed, so it needs no place.
    pages = pages_for_tokens(num_prompt + max_tokens - 1, card.page_size)
    if pages > card.num_pages:
        raise BadRequest(
            f"the request needs {pages} KV pages ({num_prompt} tokens of the prompt, "
            f"{max_tokens} of the completion), but the pool has {card.num_pages}",
            code="context_length_exceeded",
        )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
