"""The engine as its callers (HTTP server, CLI, `LLM`) see it: text in, text out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from phloem.core.request import NOTHING_CACHED, CachedTokens, FinishReason, SamplingParams
from phloem.core.stats import EngineStats
from phloem.engine.commands import Command

__all__ = [
    "EngineClient",
    "Health",
    "ModelCard",
    "SamplingDefaults",
    "TextChunk",
    "TextLogprob",
    "TextRequest",
    "TextTokenizer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What holds where a request does not say."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What is served."""

    name: str
    path: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int  # prompt + completion, in tokens
    page_size: int
    num_pages: int
    page_bytes: int
    created_s: int  # Unix time
    sampling: SamplingDefaults = SamplingDefaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """One prompt (packed int32 token ids) and how to continue it."""

    request_id: str
    tokens: bytes
    sampling: SamplingParams
    cache_salt: str | None = None
    routing_key: str | None = None
    priority: int = 0
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """One token as text: `raw` are its bytes, which need not be whole characters."""

    token: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[TextLogprob, ...] = ()


class TextChunk(msgspec.Struct, frozen=True, kw_only=True):
    """New text of one request; text held back (half a character, a possible stop) comes later.

    The last chunk carries `finish`, and `stop_reason` where a stop string or stop id ended it.
    Counts are totals so far.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TextLogprob, ...] = ()
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: CachedTokens = NOTHING_CACHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Read from the loop's heartbeat in shared memory: costs no message to the engine."""

    alive: bool  # the engine process runs and has made progress recently, or is idle
    ready: bool  # the model is loaded and requests are accepted (not draining)
    idle: bool
    progress: int  # grows with every pass of the loop and as layers are computed
    since_progress_s: float
    reason: str = ""
    ended: bool = False  # the process is gone and will not come back


class TextTokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Packed int32 ids."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text; bytes that are no valid UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes that a token stands for (of a special token: its text)."""
        ...

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Apply the model's chat template. Raises BadRequest if there is none or it refuses."""
        ...


class EngineClient(Protocol):
    """An engine that answers many requests at once."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def tokenizer(self) -> TextTokenizer: ...

    def check(self, request: TextRequest) -> None:
        """Raise UserError (400) now for what can never be served (too long, bad ids, ...)."""
        ...

    def generate(self, request: TextRequest) -> AsyncIterator[TextChunk]:
        """Stream a completion. Closing the iterator before its end aborts the request.

        Raises UserError if the request is refused, EngineDead if the engine ended.
        """
        ...

    async def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        ...

    async def flush_cache(self) -> int:
        """Forget every page that no running request holds; returns how many pages stay locked."""
        ...

    async def operate(self, command: Command) -> dict[str, Any]:
        """Carry out an operator's command. Raises BadRequest with the reason if it is refused."""
        ...

    def health(self) -> Health:
        """At once, from shared memory."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, wait for the running ones; False if some had to be aborted."""
        ...

    async def close(self) -> None:
        """Stop the engine and its process."""
        ...
