"""A client that talks to the app in this process and event loop (answers come whole)."""

from __future__ import annotations

import json
from typing import Any

import httpx

from phloem.server import ServerSettings, create_app
from tests.server.fake_engine import FakeEngine


def client(engine: FakeEngine, settings: ServerSettings | None = None) -> httpx.AsyncClient:
    """Use as a context manager."""
    transport = httpx.ASGITransport(create_app(engine, settings))
    return httpx.AsyncClient(transport=transport, base_url="http://phloem")


def events(text: str) -> list[Any]:
    """The events of a stream; "[DONE]" stays a string."""
    out = []
    for block in text.split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            data = block.removeprefix("data: ")
            out.append(data if data == "[DONE]" else json.loads(data))
    return out


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A body for /v1/chat/completions."""
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}


def completion(prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    """A body for /v1/completions."""
    return {"model": "fake", "prompt": prompt, **fields}
