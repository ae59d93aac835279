"""docs/one_request.md is walked: every row is passed by one real request, in the written order."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from phloem.config import CacheOptions, Config, ModelOptions, RuntimeOptions
from phloem.engine import AsyncEngine
from phloem.server import create_app
from tests.e2e.walk import TRACE_ENV, Watch
from tests.engine.fakes import byte_tokenizer
from tests.models.checkpoints import make_checkpoint

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "one_request.md"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def rows() -> list[str]:
    """`file:function` of every table row, in order."""
    return re.findall(r"^\| `(phloem/[\w/]+\.py:[\w.]+)`", DOCUMENT.read_text(), re.M)


async def one_request(engine: AsyncEngine) -> dict[str, object]:
    transport = httpx.ASGITransport(app=create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://walk") as http:
        body = {
            "model": engine.card.name,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 24,
            "temperature": 0,
        }
        answer = await http.post("/v1/chat/completions", json=body, timeout=60)
        await engine.close()
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_one_request_walks_the_document_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First calls of the named functions, over both processes, come in the order of the rows."""
    make_checkpoint("llama", tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    trace = tmp_path / "walk.txt"
    monkeypatch.setenv(TRACE_ENV, str(trace))
    config = Config(
        model=ModelOptions(model=str(tmp_path), dtype="fp32"),
        cache=CacheOptions(num_pages=64, page_size=4),
        runtime=RuntimeOptions(threads=1, kernels="torch"),
    )
    engine = AsyncEngine.launch(config, builder="tests.e2e.walk:build")
    watch = Watch(trace)
    watch.start()
    try:
        reply = asyncio.run(one_request(engine))
    finally:
        watch.stop()
    assert reply["usage"]["completion_tokens"] >= 1
    first: dict[str, float] = {}
    for line in trace.read_text().splitlines():
        when, _, name = line.partition(" ")
        first[name] = min(float(when), first.get(name, float("inf")))
    named = rows()
    assert len(named) >= 25
    assert [name for name in named if name not in first] == []
    times = [first[name] for name in named]
    late = [b for a, b, t, u in zip(named, named[1:], times, times[1:], strict=False) if u < t]
    assert late == [], f"called before the row above it: {late}"
