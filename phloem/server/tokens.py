"""POST /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phloem.core.errors import BadRequest
from phloem.core.tokens import tokens_from_bytes
from phloem.server.body import parse_body, read_json
from phloem.server.context import context_of
from phloem.server.fields import DetokenizeBody, TokenizeBody
from phloem.server.prompts import parse_ids

__all__ = ["detokenize", "tokenize"]


async def tokenize(http: Request) -> Response:
    """Token ids of a prompt or of a conversation, exactly as the engine would see them."""
    context = context_of(http)
    fields = await read_json(http, context.settings.max_body_bytes)
    body = parse_body(TokenizeBody, fields)
    context.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("give either prompt or messages", param="prompt")
    if body.prompt is None:
        tokens = await context.prompts.messages(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            special=body.add_special_tokens is True,
        )
    elif body.prompt == "" and body.add_special_tokens is False:
        tokens = b""
    else:
        special = body.add_special_tokens is not False
        tokens = await context.prompts.text(body.prompt, name="prompt", special=special)
    ids = tokens_from_bytes(tokens).tolist()
    limit = context.card.max_model_len
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": limit})


async def detokenize(http: Request) -> Response:
    """Text of token ids; under both names that clients look for."""
    context = context_of(http)
    fields = await read_json(http, context.settings.max_body_bytes)
    body = parse_body(DetokenizeBody, fields)
    context.model_name(body.model)
    if not isinstance(body.tokens, list):
        raise BadRequest("tokens must be an array of token ids", param="tokens")
    if body.tokens:
        parse_ids(body.tokens, name="tokens", vocab_size=context.card.vocab_size)
    text = context.engine.tokenizer.decode(
        body.tokens, skip_special_tokens=body.skip_special_tokens
    )
    return JSONResponse({"prompt": text, "text": text})
