"""POST /generate: token ids or text in, token ids and text out; /abort_request."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phloem.core.errors import BadRequest, NotFound
from phloem.core.request import FinishReason, SamplingParams
from phloem.engine.api import TextChunk, TextLogprob, TextRequest
from phloem.server.answer import JsonAnswer, SseAnswer, event
from phloem.server.body import parse_body, read_json
from phloem.server.completions import collect_all
from phloem.server.context import Context, context_of
from phloem.server.fields import AbortBody, GenerateBody
from phloem.server.front import info_of
from phloem.server.runs import merge
from phloem.server.sampling import check_length, make_sampling
from phloem.server.wire import cached_split, finite_logprob

__all__ = ["abort_request", "generate"]


async def generate(http: Request) -> Response:
    """Continue one prompt (an object comes back) or several (an array)."""
    context = context_of(http)
    fields = await read_json(http, context.settings.max_body_bytes)
    body = parse_body(GenerateBody, fields)
    context.model_name(body.model)
    source, value = _source(body)
    prompts = await context.prompts.prompts(value, name=source)
    request_id = info_of(http.scope).adopt(body.request_id or body.rid)
    sampling = _sampling(context, body)
    requests = []
    for tokens in prompts:
        check_length(
            tokens, sampling.max_tokens, context.card, source=source, name="max_new_tokens"
        )
        request = _request(body, request_id, tokens, sampling)
        context.engine.check(request)
        requests.append(request)
    answer = _Answer(request_id, body, batch=_is_batch(source, value))
    if body.stream:
        return SseAnswer(answer.stream(context, requests), request_id)
    return JsonAnswer(lambda: answer.whole(context, requests))


def _source(body: GenerateBody) -> tuple[str, object]:
    if (body.text is None) == (body.input_ids is None):
        raise BadRequest("give either text or input_ids", param="input_ids")
    if body.input_ids is None:
        if isinstance(body.text, list) and not all(isinstance(t, str) for t in body.text):
            raise BadRequest("text must be a string or an array of strings", param="text")
        return "text", body.text
    value = body.input_ids
    if not isinstance(value, list) or any(isinstance(item, str) for item in value):
        raise BadRequest(
            "input_ids must be an array of token ids, or an array of such arrays",
            param="input_ids",
        )
    return "input_ids", value


def _is_batch(source: str, value: object) -> bool:
    if not isinstance(value, list):
        return False
    return source == "text" or isinstance(value[0], list)


def _sampling(context: Context, body: GenerateBody) -> SamplingParams:
    params = body.sampling_params
    if params.min_new_tokens is not None:
        params.min_tokens = params.min_new_tokens
    if params.sampling_seed is not None:
        params.seed = params.sampling_seed
    logprobs = body.top_logprobs_num if body.return_logprob else None
    return make_sampling(
        params,
        context.card,
        max_tokens=params.max_new_tokens,
        logprobs=logprobs,
        names={"max_tokens": "max_new_tokens", "logprobs": "top_logprobs_num"},
    )


def _request(
    body: GenerateBody, request_id: str, tokens: bytes, sampling: SamplingParams
) -> TextRequest:
    return TextRequest(
        request_id=request_id,
        tokens=tokens,
        sampling=sampling,
        cache_salt=body.cache_salt,
        routing_key=body.routing_key,
        priority=body.priority,
        skip_special_tokens=body.sampling_params.skip_special_tokens,
    )


def _finish(chunk: TextChunk) -> dict[str, Any] | None:
    if chunk.finish is None:
        return None
    if chunk.finish is FinishReason.LENGTH:
        return {"type": "length", "length": chunk.completion_tokens}
    if chunk.finish is FinishReason.STOP:
        return {"type": "stop", "matched": chunk.stop_reason}
    return {"type": chunk.finish.value}


def _pair(entry: TextLogprob) -> list[Any]:
    return [finite_logprob(entry.logprob), entry.token, entry.text]


class _Answer:
    """Renders chunks in the native shape."""

    def __init__(self, request_id: str, body: GenerateBody, *, batch: bool) -> None:
        self._id = request_id
        self._body = body
        self._batch = batch
        self._start = time.monotonic()

    def _document(self, chunk: TextChunk, text: str, ids: list[int]) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._id,
            "finish_reason": _finish(chunk),
            "prompt_tokens": chunk.prompt_tokens,
            "completion_tokens": chunk.completion_tokens,
            "cached_tokens": chunk.cached.total,
            "cached_tokens_details": cached_split(chunk.cached, chunk.prompt_tokens),
        }
        if chunk.finish is not None:
            meta["e2e_latency"] = time.monotonic() - self._start
        if self._body.return_logprob:
            meta["output_token_logprobs"] = [_pair(entry) for entry in chunk.logprobs]
            meta["output_top_logprobs"] = [
                [_pair(top) for top in entry.top] for entry in chunk.logprobs
            ]
        return {"text": text, "output_ids": ids, "meta_info": meta}

    async def whole(self, context: Context, requests: list[TextRequest]) -> object:
        """One document, or an array of them for an array of prompts."""
        ends = await collect_all(context, requests)
        documents = [self._document(end, end.text, list(end.tokens)) for end in ends]
        return documents if self._batch else documents[0]

    async def stream(
        self, context: Context, requests: list[TextRequest]
    ) -> AsyncGenerator[bytes, None]:
        """Each event holds all text and ids so far (SGLang's form), or what is new."""
        texts = [""] * len(requests)
        ids: list[list[int]] = [[] for _ in requests]
        async with aclosing(merge([context.runs.follow(r) for r in requests])) as chunks:
            async for index, chunk in chunks:
                if self._body.incremental:
                    document = self._document(chunk, chunk.text, list(chunk.tokens))
                else:
                    texts[index] += chunk.text
                    ids[index] += chunk.tokens
                    document = self._document(chunk, texts[index], ids[index])
                if self._batch:
                    document["index"] = index
                yield event(msgspec.json.encode(document))


async def abort_request(http: Request) -> Response:
    """End what runs under a request id; its client gets what there is, finish reason "abort"."""
    context = context_of(http)
    body = parse_body(AbortBody, await read_json(http, context.settings.max_body_bytes))
    aborted = context.runs.abort(body.rid)
    if not aborted:
        raise NotFound(f"no request {body.rid!r:.100} is running", param="rid")
    return JSONResponse({"aborted": aborted})
