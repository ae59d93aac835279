"""The bodies that the endpoints accept. Strict: "16" is no number, 1 is no boolean.

A field that is null counts as absent (the reader drops it), so defaults stand here once.
Prompts and messages are `Any` on purpose: `prompts.py` reads them with better messages.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

__all__ = [
    "AbortBody",
    "ChatBody",
    "ClearCacheBody",
    "CompletionBody",
    "DetokenizeBody",
    "GenerateBody",
    "SamplingBody",
    "StorageBody",
    "StreamOptions",
    "TokenizeBody",
    "UpdateWeightsBody",
]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
    },
}
Ids = Annotated[Any, WithJsonSchema(_IDS)]
IdLists = Annotated[
    Any, WithJsonSchema({"anyOf": [_IDS, {"type": "array", "items": _IDS, "minItems": 1}]})
]
Texts = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _TEXTS]})]
Prompt = Annotated[
    Any,
    WithJsonSchema({"anyOf": [_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}}]}),
]
Messages = Annotated[Any, WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1})]
Strings = Annotated[list[str], BeforeValidator(_listed)]
Label = Annotated[str, Field(max_length=4096)]


class Body(BaseModel):
    """Strict types; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class SamplingBody(Body):
    """What every endpoint calls by the same name. None: the endpoint's or engine's default."""

    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] = Field(default_factory=dict)
    seed: int | None = None
    stop: Strings = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True


class Routed(Body):
    """What every generating endpoint takes besides sampling."""

    model: str | None = None
    stream: bool = False
    cache_salt: Label | None = None
    routing_key: Label | None = None
    request_id: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0


class OpenAIBody(Routed, SamplingBody):
    """What both OpenAI endpoints share."""

    max_tokens: int | None = None
    stream_options: StreamOptions | None = None


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Messages = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    add_generation_prompt: bool = True


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: Prompt = None
    logprobs: int | None = None
    add_special_tokens: bool = True


class NativeSampling(SamplingBody):
    """`sampling_params` of POST /generate."""

    max_new_tokens: int = 128
    min_new_tokens: int | None = None
    sampling_seed: int | None = None


class GenerateBody(Routed):
    """POST /generate: token ids or text in, token ids and text out."""

    text: Texts = None
    input_ids: IdLists = None
    sampling_params: NativeSampling = Field(default_factory=NativeSampling)
    rid: str | None = None
    return_logprob: bool = False
    top_logprobs_num: int = 0
    incremental: bool = False  # streams: only what is new in each event


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    add_generation_prompt: bool = True


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids = None
    skip_special_tokens: bool = False


class AbortBody(Body):
    """POST /abort_request."""

    rid: str


class ClearCacheBody(Body):
    """POST /cache/clear."""

    storage: bool = False


class StorageBody(Body):
    """POST /cache/storage."""

    directory: Annotated[str, Field(min_length=1, max_length=4096)]
    size: str = "20GB"


class UpdateWeightsBody(Body):
    """POST /update_weights_from_disk."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
