"""Prompts that are computed once, ahead of those who will ask."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from phloem.core.errors import ConfigError
from phloem.core.request import SamplingParams

__all__ = ["WarmPrompt", "Warmed", "read_prompts", "warm_directory", "warm_server"]

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """One of the three."""

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Warmed:
    """Totals over all prompts."""

    prompt_tokens: int
    cached_tokens: int


def read_prompts(path: Path) -> list[WarmPrompt]:
    """A .jsonl file holds one object a line; any other file is one prompt. Raises ConfigError."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if path.suffix != ".jsonl":
        if not text.strip():
            raise ConfigError(f"{path} is empty")
        return [WarmPrompt(text=text)]
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{path} is empty")
    return [_parse(line, f"{path}, line {number}") for number, line in lines]


def _parse(line: str, where: str) -> WarmPrompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be an object")
    given = [name for name in ("prompt", "tokens", "messages") if name in value]
    if len(given) != 1:
        raise ConfigError(f"{where}: give one of prompt, tokens or messages")
    found = value[given[0]]
    if given == ["prompt"] and isinstance(found, str) and found:
        return WarmPrompt(text=found)
    if given == ["tokens"] and _is_list_of(found, int):
        return WarmPrompt(tokens=tuple(found))
    if given == ["messages"] and _is_list_of(found, dict):
        return WarmPrompt(messages=tuple(found))
    raise ConfigError(f"{where}: {given[0]} is empty or of a wrong type")


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(x) is kind for x in value)


def warm_server(
    prompts: Sequence[WarmPrompt], url: str, api_key: str | None, model: str | None
) -> Warmed:
    """Ask a running server for one token each."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    total = cached = 0
    with httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S) as http:
        for prompt in prompts:
            usage = _complete(http, prompt, model)
            total += usage["prompt_tokens"]
            cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Warmed(total, cached)


def _complete(http: httpx.Client, prompt: WarmPrompt, model: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
    if model is not None:
        body["model"] = model
    if prompt.messages is not None:
        path, body["messages"] = "/v1/chat/completions", list(prompt.messages)
    else:
        path = "/v1/completions"
        body["prompt"] = prompt.text if prompt.tokens is None else list(prompt.tokens)
    try:
        answer = http.post(path, json=body)
        document = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"no answer from {http.base_url}: {error}") from error
    if answer.is_error:
        raise ConfigError(document.get("error", {}).get("message", f"status {answer.status_code}"))
    usage: dict[str, Any] = document["usage"]
    return usage


def warm_directory(prompts: Sequence[WarmPrompt], directory: str, size: str, model: str) -> Warmed:
    """Compute in this process, and leave the pages in a storage directory."""
    from phloem.engine import LLM  # brings the engine; the other actions do without

    total = cached = 0
    one = SamplingParams(max_tokens=1, temperature=0.0)
    with LLM(model, storage=directory, storage_size=size) as llm:
        for prompt in prompts:
            if prompt.messages is not None:
                (done,) = llm.chat(list(prompt.messages), one)
            else:
                (done,) = llm.generate(prompt.text or list(prompt.tokens or ()), one)
            total += done.prompt_tokens
            cached += done.cached_tokens
    return Warmed(total, cached)
