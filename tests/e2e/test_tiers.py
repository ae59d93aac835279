"""Serve, talk, stop, serve again, go on: the first new turn finds its pages in storage."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_commands import PHLOEM, Served

pytestmark = pytest.mark.timeout(300)

SYSTEM = "You are a careful assistant. " * 30  # more than a few pages


def ask(url: str, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any], str]:
    """Text, usage and id of an answer."""
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    document = answer.json()
    return document["choices"][0]["message"]["content"], document["usage"], document["id"]


def cache(*words: str) -> dict[str, Any]:
    """`phloem cache WORDS --json`."""
    done = subprocess.run(
        [*PHLOEM, "cache", *words, "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    flags = ["--storage", str(tmp_path), "--storage-size", "1GB", "--kv-memory", "200MB"]
    flags += ["--host-memory", "100MB"]
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Say one word."},
    ]
    server = Served(*flags)
    try:
        text, usage, _ = ask(server.url, messages)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        prompt_tokens = usage["prompt_tokens"]
    finally:
        assert server.stop() == 0
    facts = cache("stats", str(tmp_path))
    assert facts["pages"] >= prompt_tokens // 16
    assert cache("verify", str(tmp_path))["ok"]
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And another one."},
    ]
    server = Served(*flags)
    try:
        _, usage, name = ask(server.url, messages)
        assert usage["prompt_tokens_details"]["cached_tokens"] >= prompt_tokens // 16 * 16 - 16
        (why,) = cache("decisions", "--request-id", name, "--url", server.url)["decisions"]
        assert (
            why["pages"]["storage"] * 16
            == usage["prompt_tokens_details"]["cached_tokens_details"]["storage"]
        )
        assert why["choice"] == "load"
        stats = cache("stats", "--url", server.url)
        assert stats["cached_tokens"]["storage"] >= prompt_tokens // 16 * 16 - 16
        assert sum(stats["cached_tokens"].values()) < stats["prompt_tokens"]
        assert cache("verify", "--url", server.url) == {"ok": True}
        listed = cache("ls", "--url", server.url)
        assert "careful assistant" in listed["prefixes"][0]["text"]
        _change_storage(server, tmp_path)
    finally:
        assert server.stop() == 0


def _change_storage(server: Served, directory: Path) -> None:
    """Empty it, detach it, attach another one: all while it serves."""
    assert cache("clear", "--storage", "--url", server.url)["storage"] == str(directory)
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        assert http.delete("/cache/storage").json() == {"detached": True}
        body = {"directory": str(directory / "other"), "size": "500MB"}
        assert http.post("/cache/storage", json=body).json()["objects"] == 0
        again = http.post("/cache/storage", json=body)
        assert (again.status_code, "attached already" in again.text) == (400, True)
