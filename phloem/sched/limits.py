"""Which requests can never be served."""

from __future__ import annotations

from phloem.core.errors import BadRequest
from phloem.core.request import GenerateRequest
from phloem.core.tokens import TOKEN_BYTES
from phloem.kv.sizing import pages_for_tokens

__all__ = ["check_request"]


def check_request(
    request: GenerateRequest, *, max_model_len: int, num_pages: int, page_size: int
) -> None:
    """Raise BadRequest for what can never be served, saying the numbers."""
    num_bytes = len(request.tokens)
    if num_bytes == 0 or num_bytes % TOKEN_BYTES:
        raise BadRequest("the prompt must have at least one token", param="prompt")
    prompt = num_bytes // TOKEN_BYTES
    max_tokens = request.sampling.max_tokens
    positions = prompt + max_tokens - 1  # the last sampled token is never computed
    if positions > max_model_len:
        raise BadRequest(
            f"{prompt} prompt tokens and max_tokens {max_tokens} need {positions} positions; "
            f"this model's context is {max_model_len} tokens",
            param="prompt" if prompt > max_model_len else "max_tokens",
            code="context_length_exceeded",
        )
    pages = pages_for_tokens(positions, page_size)
    if pages > num_pages:
        raise BadRequest(
            f"{prompt} prompt tokens and max_tokens {max_tokens} need {pages} KV pages of "
            f"{page_size} tokens; the pool has {num_pages}",
            param="prompt" if pages_for_tokens(prompt, page_size) > num_pages else "max_tokens",
            code="context_length_exceeded",
        )
