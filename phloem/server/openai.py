"""What /v1/chat/completions and /v1/completions share: the path from a body to engine requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request

from phloem.core.errors import BadRequest
from phloem.core.request import SamplingParams
from phloem.engine.api import TextChunk, TextRequest
from phloem.server.answer import event
from phloem.server.context import Context
from phloem.server.fields import OpenAIBody
from phloem.server.front import info_of
from phloem.server.wire import usage_of

__all__ = ["Envelope", "Job", "end_fields", "make_job", "wants_usage"]

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request: one engine request for each prompt."""

    request_id: str
    model: str
    requests: tuple[TextRequest, ...]


def make_job(
    context: Context,
    http: Request,
    body: OpenAIBody,
    prompts: Sequence[tuple[bytes, SamplingParams]],
) -> Job:
    """Ask the engine whether it can serve them all. Raises UserError if it cannot."""
    model = context.model_name(body.model)
    request_id = info_of(http.scope).adopt(body.request_id)
    requests = tuple(
        TextRequest(
            request_id=request_id,
            tokens=tokens,
            sampling=sampling,
            cache_salt=body.cache_salt,
            routing_key=body.routing_key,
            priority=body.priority,
            skip_special_tokens=body.skip_special_tokens,
        )
        for tokens, sampling in prompts
    )
    for request in requests:
        context.engine.check(request)
    return Job(request_id=request_id, model=model, requests=requests)


def wants_usage(body: OpenAIBody) -> bool:
    """Whether the stream ends with a usage chunk. Raises BadRequest if nothing is streamed."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise BadRequest("stream_options is allowed only with stream: true", param="stream_options")
    return body.stream_options.include_usage


def end_fields(chunk: TextChunk) -> dict[str, Any]:
    """`finish_reason`, null before the last chunk, and then the stop that matched."""
    if chunk.finish is None:
        return {"finish_reason": None}
    return {"finish_reason": chunk.finish.value, "stop_reason": chunk.stop_reason}


class Envelope:
    """The fields around the choices, encoded once for all chunks of a stream."""

    def __init__(self, prefix: str, kind: str, job: Job, *, usage: bool = False) -> None:
        self._fields = {
            "id": prefix + job.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": job.model,
        }
        self._usage = usage
        self._head = b"data: " + _encode(self._fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"

    def document(self, choices: list[dict[str, Any]], ends: list[TextChunk]) -> dict[str, Any]:
        """A whole answer."""
        return {**self._fields, "choices": choices, "usage": usage_of(ends)}

    def event(self, choice: dict[str, Any]) -> bytes:
        """One chunk of a stream."""
        return self._head + _encode(choice) + self._tail

    def usage_event(self, ends: list[TextChunk]) -> bytes:
        """The last chunk where usage was asked for; else nothing."""
        return event(_encode(self.document([], ends))) if self._usage else b""
