"""An OpenAI-compatible server in one ASGI function, with a page cache that is a set of prefixes."""

from __future__ import annotations

import json
from typing import Any

import httpx

PAGE = 16


class StubServer:
    """Answers `max_tokens` words; counts a prompt's tokens as ids, or as words of text."""

    def __init__(self, *, report_cached: bool = True, fail_every: int = 0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._seen: set[tuple[Any, ...]] = set()
        self._report_cached = report_cached
        self._fail_every = fail_every

    @property
    def transport(self) -> httpx.ASGITransport:
        return httpx.ASGITransport(self)

    async def __call__(self, scope, receive, send) -> None:
        if scope["path"] == "/v1/models":
            await self._reply(send, 200, json.dumps({"data": [{"id": "stub"}]}).encode())
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message["body"], message.get("more_body", False)
        body = json.loads(raw)
        self.bodies.append(body)
        if self._fail_every and len(self.bodies) % self._fail_every == 0:
            error = json.dumps({"error": {"message": "no\nroom", "code": None}}).encode()
            await self._reply(send, 503, error)
            return
        await self._reply(send, 200, b"".join(self._events(body)))

    def _events(self, body: dict[str, Any]):
        tokens = self._tokens(body)
        cached = self._match(tokens)
        for i in range(body["max_tokens"]):
            piece = f"w{i} "
            choice = {"delta": {"content": piece}} if "messages" in body else {"text": piece}
            yield self._event({"choices": [choice], "usage": None})
        usage: dict[str, Any] = {
            "prompt_tokens": len(tokens),
            "completion_tokens": body["max_tokens"],
        }
        if self._report_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        yield self._event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def _tokens(self, body: dict[str, Any]) -> tuple[Any, ...]:
        if "messages" in body:
            return tuple(" ".join(m["content"] for m in body["messages"]).split())
        prompt = body["prompt"]
        return tuple(prompt.split() if isinstance(prompt, str) else prompt)

    def _match(self, tokens: tuple[Any, ...]) -> int:
        usable = (len(tokens) - 1) // PAGE * PAGE
        ends = range(PAGE, len(tokens) + 1, PAGE)
        hits = [end for end in ends if tokens[:end] in self._seen and end <= usable]
        self._seen.update(tokens[:end] for end in ends)
        return max(hits, default=0)

    @staticmethod
    def _event(data: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(data).encode() + b"\n\n"

    @staticmethod
    async def _reply(send, status: int, body: bytes) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})
