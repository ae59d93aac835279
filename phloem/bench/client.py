"""A small streaming client for any OpenAI-compatible server, with times taken at each chunk."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from phloem.core.errors import ConfigError

__all__ = ["Answer", "Client", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the server reports them; None where it does not."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    @classmethod
    def from_json(cls, usage: dict[str, Any]) -> Usage:
        """From the `usage` object of a response."""
        details = usage.get("prompt_tokens_details") or {}
        return cls(
            usage.get("prompt_tokens"),
            usage.get("completion_tokens"),
            details.get("cached_tokens"),
        )


@dataclass(slots=True)
class Answer:
    """One request as its client saw it. Times are seconds of one monotonic clock."""

    sent_s: float
    chunk_s: list[float] = field(default_factory=list)  # arrival of each chunk with text
    end_s: float = 0.0
    text: str = ""
    usage: Usage = field(default_factory=Usage)
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """From sending to the first text (to the end, if no text came)."""
        return (self.chunk_s[0] if self.chunk_s else self.end_s) - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one chunk of text and the next."""
        return [b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False)]


class Client:
    """Talks to one base URL; use as an async context manager."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url must begin with http:// or https://, got {url!r}")
        base = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # trust_env off: a proxy of the environment must not stand between client and server.
        self._http = httpx.AsyncClient(
            base_url=base,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=limits,
            trust_env=False,
            transport=transport,
        )
        self.url = base

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give back the connections."""
        await self._http.aclose()

    async def first_model(self) -> str:
        """The first name in /v1/models. Raises ConfigError if there is no such server."""
        try:
            reply = await self._http.get("/v1/models")
            reply.raise_for_status()
            return str(reply.json()["data"][0]["id"])
        except httpx.HTTPStatusError as error:
            raise ConfigError(
                f"{self.url}/v1/models answered {error.response.status_code}: "
                f"{_message(error.response.content)}"
            ) from None
        except httpx.HTTPError as error:
            raise ConfigError(f"no server answers at {self.url}: {_reason(error)}") from None
        except (ValueError, KeyError, IndexError, TypeError):
            raise ConfigError(f"{self.url}/v1/models lists no model") from None

    async def complete(self, body: dict[str, Any]) -> Answer:
        """Send to /v1/chat/completions or /v1/completions (by `messages`), reading to the end.

        Failures of the server or of the connection are in `Answer.error`, never raised.
        """
        answer = Answer(time.monotonic())
        try:
            async for text in self.stream(body, answer):
                answer.text += text
        except httpx.HTTPError as error:
            answer.error = _reason(error)
        answer.end_s = answer.end_s or time.monotonic()
        return answer

    async def stream(self, body: dict[str, Any], answer: Answer) -> AsyncGenerator[str, None]:
        """Yield the pieces of text as they arrive, filling in `answer`."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        full = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", path, json=full) as reply:
            if reply.status_code != 200:
                answer.error = f"HTTP {reply.status_code}: {_message(await reply.aread())}"
                return
            async for event in _events(reply):
                if event == b"[DONE]":
                    break
                text = _take(json.loads(event), answer)
                if text:
                    answer.chunk_s.append(time.monotonic())
                    yield text
        answer.end_s = time.monotonic()

    async def post(self, path: str) -> None:
        """POST without a body; a server that does not know the path is no error."""
        try:
            await self._http.post(path)
        except httpx.HTTPError as error:
            raise ConfigError(f"no server answers at {self.url}: {_reason(error)}") from None


async def _events(reply: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest = b""
    async for part in reply.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _take(event: dict[str, Any], answer: Answer) -> str:
    """Fold one event into `answer` and return its text."""
    if event.get("usage"):
        answer.usage = Usage.from_json(event["usage"])
    if event.get("error"):
        error = event["error"]
        answer.error = str(error.get("message", error) if isinstance(error, dict) else error)
    choices: Sequence[dict[str, Any]] = event.get("choices") or ()
    if not choices:
        return ""
    choice = choices[0]
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def _message(body: bytes) -> str:
    """The message of an error body, in one line."""
    try:
        return " ".join(str(json.loads(body)["error"]["message"]).split())
    except (ValueError, KeyError, TypeError):
        return " ".join(body[:200].decode("utf-8", "replace").split())


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
