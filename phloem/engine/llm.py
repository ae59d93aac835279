"""LLM: the engine inside the caller's own process, for scripts and notebooks."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias

from phloem.config import (
    CacheOptions,
    Config,
    ModelOptions,
    ParallelOptions,
    RuntimeOptions,
    SchedulerOptions,
    TierOptions,
)
from phloem.config.checkpoint import read_model_config
from phloem.core.errors import BadRequest, ConfigError, EngineDead
from phloem.core.namespace import make_namespace
from phloem.core.request import (
    CachedTokens,
    FinishReason,
    GenerateRequest,
    OutputChunk,
    SamplingParams,
)
from phloem.core.stats import EngineStats
from phloem.core.tokens import num_tokens, tokens_to_bytes
from phloem.engine.api import ModelCard, TextChunk, TextLogprob, TextRequest
from phloem.engine.assembly import TextAssembly, merge_chunks
from phloem.engine.checks import check_request
from phloem.engine.commands import Command, CommandReply
from phloem.engine.core import CoreBuilder, EngineCore, OnLoad
from phloem.engine.models import load_tokenizer, resolve_model
from phloem.engine.tokenizer import ModelTokenizer

__all__ = ["LLM", "Completion"]

Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = Mapping[str, Any]

_CHAT_MAX_TOKENS = 512
_GENERATE_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to one prompt. `error` is set where `finish_reason` is "error"."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    cached: CachedTokens  # the same, by where they came from
    logprobs: tuple[TextLogprob, ...] = ()
    stop_reason: int | str | None = None
    error: str | None = None


class _Hooks:
    """What the core calls: collects output until the caller takes it."""

    def __init__(self, on_load: OnLoad | None) -> None:
        self._on_load = on_load
        self.chunks: list[OutputChunk] = []

    def emit(self, chunks: list[OutputChunk]) -> None:
        self.chunks += chunks

    def on_layer(self) -> None:
        """Nobody watches a heartbeat here."""

    def on_wait(self) -> None:
        """Nobody else has anything to say here."""

    def wake(self) -> None:
        """The next call looks."""

    def on_load(self, done: int, total: int, phase: str) -> None:
        if self._on_load is not None:
            self._on_load(done, total, phase)


def config_from_settings(model: str, settings: Mapping[str, Any]) -> Config:
    """A Config from flat keyword settings, each one by its own name (`dtype`, `num_pages` ...)."""
    groups: dict[str, type[Any]] = {
        "model": ModelOptions,
        "cache": CacheOptions,
        "tiers": TierOptions,
        "parallel": ParallelOptions,
        "scheduler": SchedulerOptions,
        "runtime": RuntimeOptions,
    }
    owner = {
        field.name: group for group, kind in groups.items() for field in dataclasses.fields(kind)
    }
    chosen: dict[str, dict[str, Any]] = {group: {} for group in groups}
    for name, value in settings.items():
        if name not in owner:
            close = difflib.get_close_matches(name, owner, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"unknown setting {name!r}{hint}")
        chosen[owner[name]][name] = value
    chosen["model"]["model"] = model
    return Config(**{group: kind(**chosen[group]) for group, kind in groups.items()})


class LLM:
    """A model in this process. Close it, or use it as a context manager.

    Calls from several threads wait for each other; put all prompts of a batch into one call.

    `settings` are the server's flags as keywords: `LLM("smollm2", dtype="fp32", num_pages=512)`.
    Raises ConfigError for a model or setting that cannot be used.
    """

    def __init__(
        self,
        model: str,
        *,
        on_load: OnLoad | None = None,
        builder: CoreBuilder | None = None,
        **settings: Any,
    ) -> None:
        config = config_from_settings(model, settings)
        resolved = resolve_model(model)
        read_model_config(resolved.path)  # refused before torch is loaded
        self._tokenizer = load_tokenizer(resolved)
        self._hooks = _Hooks(on_load)
        build = builder or _default_builder()
        self._core: EngineCore | None = build(config, self._hooks, self._tokenizer.eos_ids)
        self._card = self._core.facts.card
        self._serial = itertools.count()
        self._lock = threading.Lock()
        self._window = config.scheduler.max_running + config.scheduler.max_queued

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def tokenizer(self) -> ModelTokenizer:
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[Completion]:
        """Continue each prompt (text, or token ids); completions come in the prompts' order.

        `sampling` is one for all, or one per prompt. Raises BadRequest, before anything is
        computed, if any prompt can never be served.
        """
        alone = isinstance(prompts, str) or (
            len(prompts) > 0 and all(isinstance(item, int) for item in prompts)
        )
        items: Sequence[Any] = [prompts] if alone else prompts
        return self._run(
            [self._tokens(item) for item in items],
            _per_prompt(sampling or self._default_sampling(), len(items)),
            cache_salt,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[Completion]:
        """Answer a conversation, or several; without `sampling`, up to 512 tokens each."""
        alone = len(messages) > 0 and isinstance(messages[0], Mapping)
        chats: Sequence[Any] = [messages] if alone else messages
        tokens = [
            self._tokenizer.encode(self._tokenizer.chat_prompt(chat), add_special_tokens=False)
            for chat in chats
        ]
        if sampling is None:
            sampling = [self._chat_sampling(item) for item in tokens]
        return self._run(tokens, _per_prompt(sampling, len(tokens)), cache_salt)

    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self._live().stats()

    def flush_cache(self) -> int:
        """Forget the cached pages; returns how many stay locked."""
        return self._live().flush()

    def operate(self, command: Command) -> dict[str, Any]:
        """Carry out an operator's command, to its end. Raises ConfigError if it is refused."""
        replies: list[CommandReply] = []
        with self._lock:
            core = self._live()
            core.command(command, replies.append)
            while not replies:
                core.step()
        if replies[0].error is not None:
            raise ConfigError(replies[0].error)
        return replies[0].result

    def close(self) -> None:
        """Give back memory and threads. Idempotent."""
        core, self._core = self._core, None
        if core is not None:
            core.farewell()
            core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _live(self) -> EngineCore:
        if self._core is None:
            raise EngineDead("this LLM has been closed")
        return self._core

    def _tokens(self, prompt: Prompt) -> bytes:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        try:
            return tokens_to_bytes(prompt)
        except (OverflowError, TypeError, ValueError) as error:
            raise BadRequest(f"a prompt is text or a list of token ids: {error}") from error

    def _chat_sampling(self, tokens: bytes) -> SamplingParams:
        room = self._card.max_model_len - num_tokens(tokens)
        return self._default_sampling(max_tokens=max(min(room, _CHAT_MAX_TOKENS), 1))

    def _default_sampling(self, max_tokens: int = _GENERATE_MAX_TOKENS) -> SamplingParams:
        """As the model's makers recommend."""
        return SamplingParams(max_tokens=max_tokens, **asdict(self._card.sampling))

    def _run(
        self, prompts: list[bytes], samplings: Sequence[SamplingParams], cache_salt: str | None
    ) -> list[Completion]:
        requests = [
            TextRequest(
                request_id=f"llm-{next(self._serial)}",
                tokens=tokens,
                sampling=sampling,
                cache_salt=cache_salt,
            )
            for tokens, sampling in zip(prompts, samplings, strict=True)
        ]
        for request in requests:
            check_request(request, self._card)
        with self._lock:
            run = _Run(self._live(), self._hooks, self._tokenizer, self._window)
            try:
                answers = run.to_the_end(requests, self._card.path)
            finally:
                run.abort_rest()  # after Ctrl-C or an error; nothing is left otherwise
        return [_completion(answers[request.request_id]) for request in requests]


class _Run:
    """One call of `generate`: feeds requests in, steps the core, sorts what comes out."""

    def __init__(
        self, core: EngineCore, hooks: _Hooks, tokenizer: ModelTokenizer, window: int
    ) -> None:
        self._core = core
        self._hooks = hooks
        self._tokenizer = tokenizer
        self._window = window  # so many may be at the engine at once
        self._open: dict[str, TextAssembly] = {}
        self._texts: dict[str, list[TextChunk]] = {}

    def to_the_end(
        self, requests: Sequence[TextRequest], model_path: str
    ) -> dict[str, list[TextChunk]]:
        waiting = deque(requests)
        while waiting or self._open:
            while waiting and len(self._open) < self._window:
                self._add(waiting.popleft(), model_path)
            busy = self._core.step()
            if not busy and not self._hooks.chunks and self._open:
                raise EngineDead("the engine is idle while requests wait")
            self._sort_output()
        return self._texts

    def _add(self, request: TextRequest, model_path: str) -> None:
        name = request.request_id
        self._open[name] = TextAssembly(
            self._tokenizer, request.sampling, skip_special_tokens=request.skip_special_tokens
        )
        self._texts[name] = []
        self._core.add(
            GenerateRequest(
                request_id=name,
                tokens=request.tokens,
                sampling=request.sampling,
                namespace=make_namespace(model=model_path, salt=request.cache_salt),
                arrival_s=time.monotonic(),
            )
        )

    def _sort_output(self) -> None:
        chunks, self._hooks.chunks = self._hooks.chunks, []
        for chunk in chunks:
            assembly = self._open.get(chunk.request_id)
            if assembly is None:
                continue  # ended by a stop string, or by an earlier call that was interrupted
            text = assembly.feed(chunk)
            self._texts[chunk.request_id].append(text)
            if text.finish is not None:
                del self._open[chunk.request_id]
                if chunk.finish is None:
                    self._core.abort(chunk.request_id)

    def abort_rest(self) -> None:
        for name in self._open:
            self._core.abort(name)
        self._open.clear()
        while self._core.step():  # let what is in flight come home
            pass
        self._hooks.chunks.clear()


def _per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams], count: int
) -> Sequence[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise BadRequest(f"{len(sampling)} sampling parameters for {count} prompts")
    return sampling


def _completion(chunks: list[TextChunk]) -> Completion:
    whole = merge_chunks(chunks)
    return Completion(
        text=whole.text,
        token_ids=whole.tokens,
        finish_reason=(whole.finish or FinishReason.ERROR).value,
        prompt_tokens=whole.prompt_tokens,
        cached_tokens=whole.cached.total,
        cached=whole.cached,
        logprobs=whole.logprobs,
        stop_reason=whole.stop_reason,
        error=whole.error,
    )


def _default_builder() -> CoreBuilder:
    # A factory's import: the core brings torch, which the front otherwise never loads.
    from phloem.engine.build import build_core

    return build_core
