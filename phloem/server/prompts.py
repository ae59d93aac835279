"""From prompts and messages to packed token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from phloem.core.errors import BadRequest
from phloem.core.tokens import tokens_to_bytes
from phloem.engine.api import TextTokenizer

__all__ = ["PromptReader", "parse_ids", "parse_messages"]

T = TypeVar("T")

# Longer texts are encoded in a thread, so that other requests and /health go on meanwhile.
_INLINE_CHARS = 16 * 1024

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def parse_ids(ids: Sequence[Any], *, name: str, vocab_size: int) -> bytes:
    """Packed int32 of a JSON array of token ids. Raises BadRequest naming the first bad one."""
    if not ids:
        raise BadRequest(f"{name} is empty: at least one token is needed", param=name)
    if set(map(type, ids)) != {int}:
        at = next(i for i, value in enumerate(ids) if type(value) is not int)
        raise BadRequest(f"{name}[{at}] must be a token id, got {ids[at]!r:.60}", param=name)
    if min(ids) < 0 or max(ids) >= vocab_size:
        at = next(i for i, value in enumerate(ids) if not 0 <= value < vocab_size)
        raise BadRequest(
            f"{name}[{at}] is {ids[at]}, outside the vocabulary of {vocab_size} ids", param=name
        )
    return tokens_to_bytes(np.array(ids, dtype=np.int32))


def parse_messages(messages: object) -> list[dict[str, str]]:
    """Messages with plain text contents; parts are joined by newlines. Raises BadRequest."""
    if messages is None:
        raise BadRequest("messages is required", param="messages", code="missing_parameter")
    if not isinstance(messages, list):
        raise BadRequest("messages must be an array of messages", param="messages")
    if not messages:
        raise BadRequest("messages is empty: at least one is needed", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise BadRequest(f"{where} must be an object with role and content", param=where)
    role = message.get("role")
    if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise BadRequest(
            f"{where}: tool calls are not supported yet", param=where, code="unsupported_parameter"
        )
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise BadRequest(
            f"{where}.role must be one of {known}, got {role!r:.60}", param=f"{where}.role"
        )
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    return {"role": _ROLES[role], "content": _content(content, f"{where}.content")}


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string or an array of text parts", param=where)
    texts: list[str] = []
    for i, part in enumerate(content):
        at = f"{where}[{i}]"
        if not isinstance(part, dict):
            raise BadRequest(f"{at} must be an object with type and text", param=at)
        if part.get("type") != "text":
            raise BadRequest(
                f"{at}: a content part of type {part.get('type')!r:.60} is not supported yet",
                param=at,
                code="unsupported_parameter",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise BadRequest(f"{at}.text must be a string", param=f"{at}.text")
        texts.append(text)
    return "\n".join(texts)


class PromptReader:
    """Reads what the endpoints call prompt, text, input_ids and messages."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, max_prompts: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_prompts = max_prompts

    async def text(self, text: str, *, name: str, special: bool = True) -> bytes:
        """Encode one text. Raises BadRequest if no token comes of it."""
        tokens = await _off_loop(
            len(text), lambda: self._tokenizer.encode(text, add_special_tokens=special)
        )
        if not tokens:
            raise BadRequest(f"{name} is empty: at least one token is needed", param=name)
        return tokens

    async def messages(
        self, messages: object, *, add_generation_prompt: bool = True, special: bool = False
    ) -> bytes:
        """Apply the chat template, which writes its own special tokens, and encode."""
        parsed = parse_messages(messages)

        def render() -> bytes:
            plain: Sequence[Mapping[str, Any]] = parsed
            prompt = self._tokenizer.chat_prompt(plain, add_generation_prompt=add_generation_prompt)
            return self._tokenizer.encode(prompt, add_special_tokens=special)

        tokens = await _off_loop(sum(len(m["content"]) for m in parsed), render)
        if not tokens:
            raise BadRequest("messages give an empty prompt", param="messages")
        return tokens

    async def prompts(self, value: object, *, name: str, special: bool = True) -> list[bytes]:
        """One prompt (text or ids) or several: always a list. Raises BadRequest."""
        if isinstance(value, str):
            return [await self.text(value, name=name, special=special)]
        if not isinstance(value, list):
            raise BadRequest(
                f"{name} must be a string, an array of token ids, or an array of either",
                param=name,
            )
        if not value or isinstance(value[0], int):
            return [parse_ids(value, name=name, vocab_size=self._vocab_size)]
        if len(value) > self._max_prompts:
            raise BadRequest(
                f"{name} holds {len(value)} prompts, more than {self._max_prompts}", param=name
            )
        return [
            await self._one(item, f"{name}[{i}]", special=special) for i, item in enumerate(value)
        ]

    async def _one(self, value: object, name: str, *, special: bool) -> bytes:
        if isinstance(value, str):
            return await self.text(value, name=name, special=special)
        if isinstance(value, list):
            return parse_ids(value, name=name, vocab_size=self._vocab_size)
        raise BadRequest(f"{name} must be a string or an array of token ids", param=name)


async def _off_loop(num_chars: int, function: Callable[[], T]) -> T:
    if num_chars <= _INLINE_CHARS:
        return function()
    return await asyncio.to_thread(function)
