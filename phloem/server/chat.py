"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from phloem.core.errors import BadRequest
from phloem.engine.api import TextChunk
from phloem.server.answer import JsonAnswer, SseAnswer
from phloem.server.body import parse_body, read_json
from phloem.server.context import Context, context_of
from phloem.server.fields import ChatBody
from phloem.server.openai import Envelope, Job, end_fields, make_job, wants_usage
from phloem.server.runs import collect
from phloem.server.sampling import check_length, make_sampling, room_for
from phloem.server.wire import chat_logprobs

__all__ = ["chat_completions"]

_PREFIX = "chatcmpl-"


async def chat_completions(http: Request) -> Response:
    """Answer one conversation."""
    context = context_of(http)
    fields = await read_json(http, context.settings.max_body_bytes)
    body = parse_body(ChatBody, fields)
    context.model_name(body.model)  # an unknown model is told before a wrong message
    usage = wants_usage(body)
    job = await _job(context, http, body)
    if body.stream:
        return SseAnswer(_stream(context, job, body, usage=usage), job.request_id)
    return JsonAnswer(lambda: _whole(context, job, body))


async def _job(context: Context, http: Request, body: ChatBody) -> Job:
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    tokens = await context.prompts.messages(
        body.messages, add_generation_prompt=body.add_generation_prompt
    )
    name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    asked = body.max_completion_tokens if name != "max_tokens" else body.max_tokens
    if asked is None:
        asked = room_for(tokens, context.card, source="messages")
    logprobs = body.top_logprobs if body.logprobs else None
    names = {"max_tokens": name, "logprobs": "top_logprobs"}
    sampling = make_sampling(body, context.card, max_tokens=asked, logprobs=logprobs, names=names)
    check_length(tokens, asked, context.card, source="messages", name=name)
    return make_job(context, http, body, [(tokens, sampling)])


async def _whole(context: Context, job: Job, body: ChatBody) -> dict[str, Any]:
    end = await collect(context.runs.follow(job.requests[0]))
    message: dict[str, Any] = {"role": "assistant", "content": end.text, "refusal": None}
    message["annotations"] = []  # some clients' schemas require it
    choice = {
        "index": 0,
        "message": message,
        "logprobs": chat_logprobs(end.logprobs) if body.logprobs else None,
        **end_fields(end),
    }
    return Envelope(_PREFIX, "chat.completion", job).document([choice], [end])


def _choice(delta: dict[str, Any], chunk: TextChunk, body: ChatBody) -> dict[str, Any]:
    logprobs = chat_logprobs(chunk.logprobs) if body.logprobs and chunk.logprobs else None
    return {"index": 0, "delta": delta, "logprobs": logprobs, **end_fields(chunk)}


async def _stream(
    context: Context, job: Job, body: ChatBody, *, usage: bool
) -> AsyncGenerator[bytes, None]:
    envelope = Envelope(_PREFIX, "chat.completion.chunk", job, usage=usage)
    first = envelope.event(_choice({"role": "assistant", "content": ""}, TextChunk(), body))
    chunk = TextChunk()
    async with aclosing(context.runs.follow(job.requests[0])) as chunks:
        async for chunk in chunks:
            if not (chunk.text or chunk.finish or (body.logprobs and chunk.logprobs)):
                continue  # text held back: half a character, or the start of a stop string
            delta = {"content": chunk.text} if chunk.text or not chunk.finish else {}
            yield first + envelope.event(_choice(delta, chunk, body))
            first = b""
    if usage:
        yield envelope.usage_event([chunk])
