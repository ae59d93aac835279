"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from phloem.core.errors import BadRequest
from phloem.engine.api import TextChunk, TextRequest
from phloem.server.answer import JsonAnswer, SseAnswer
from phloem.server.body import parse_body, read_json
from phloem.server.context import Context, context_of
from phloem.server.fields import CompletionBody
from phloem.server.openai import Envelope, Job, end_fields, make_job, wants_usage
from phloem.server.runs import collect, merge
from phloem.server.sampling import check_length, make_sampling
from phloem.server.wire import CompletionLogprobs

__all__ = ["collect_all", "completions"]

_PREFIX = "cmpl-"
_DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(http: Request) -> Response:
    """Continue one prompt or several."""
    context = context_of(http)
    fields = await read_json(http, context.settings.max_body_bytes)
    body = parse_body(CompletionBody, fields)
    context.model_name(body.model)
    usage = wants_usage(body)
    job = await _job(context, http, body)
    if body.stream:
        return SseAnswer(_stream(context, job, body, usage=usage), job.request_id)
    return JsonAnswer(lambda: _whole(context, job, body))


async def _job(context: Context, http: Request, body: CompletionBody) -> Job:
    if body.prompt is None:
        raise BadRequest("prompt is required", param="prompt", code="missing_parameter")
    asked = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = make_sampling(body, context.card, max_tokens=asked, logprobs=body.logprobs, names={})
    prompts = await context.prompts.prompts(
        body.prompt, name="prompt", special=body.add_special_tokens
    )
    for tokens in prompts:
        check_length(tokens, asked, context.card, source="prompt", name="max_tokens")
    return make_job(context, http, body, [(tokens, sampling) for tokens in prompts])


async def collect_all(context: Context, requests: Sequence[TextRequest]) -> list[TextChunk]:
    """All answers, in order; the first failure ends the others."""
    if len(requests) == 1:
        return [await collect(context.runs.follow(requests[0]))]
    tasks = [asyncio.create_task(collect(context.runs.follow(r))) for r in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _whole(context: Context, job: Job, body: CompletionBody) -> dict[str, Any]:
    ends = await collect_all(context, job.requests)
    choices = [
        {
            "index": index,
            "text": end.text,
            "logprobs": CompletionLogprobs().render(end.logprobs)
            if body.logprobs is not None
            else None,
            **end_fields(end),
        }
        for index, end in enumerate(ends)
    ]
    return Envelope(_PREFIX, "text_completion", job).document(choices, ends)


async def _stream(
    context: Context, job: Job, body: CompletionBody, *, usage: bool
) -> AsyncGenerator[bytes, None]:
    envelope = Envelope(_PREFIX, "text_completion", job, usage=usage)
    ends: list[TextChunk] = []
    wanted = body.logprobs is not None
    renderers = [CompletionLogprobs() for _ in job.requests]
    async with aclosing(merge([context.runs.follow(r) for r in job.requests])) as chunks:
        async for index, chunk in chunks:
            if chunk.finish is not None:
                ends.append(chunk)
            elif not (chunk.text or (wanted and chunk.logprobs)):
                continue
            logprobs = None
            if wanted and chunk.logprobs:
                logprobs = renderers[index].render(chunk.logprobs)
            choice = {"index": index, "text": chunk.text, "logprobs": logprobs}
            yield envelope.event({**choice, **end_fields(chunk)})
    if usage:
        yield envelope.usage_event(ends)
