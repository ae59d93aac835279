"""docs/api.md names every endpoint, metric and refused field: it cannot fall behind."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from phloem.server import create_app
from phloem.server.fields import ChatBody, CompletionBody, GenerateBody
from phloem.server.unsupported import unsupported_names
from tests.server.fake_engine import FakeEngine
from tests.server.http import client

DOC = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def test_every_endpoint_is_documented() -> None:
    paths = create_app(FakeEngine()).openapi()["paths"]
    assert [path for path in paths if f"`{path}`" not in DOC] == []


def test_every_field_is_documented() -> None:
    fields = {*ChatBody.model_fields, *CompletionBody.model_fields, *GenerateBody.model_fields}
    refused = set(unsupported_names())
    assert sorted(name for name in fields | refused if f"`{name}" not in DOC) == []


async def test_every_metric_is_documented() -> None:
    async with client(FakeEngine()) as http:
        text = (await http.get("/metrics")).text
    missing = []
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if f"`{name}" not in DOC:
            missing.append(name)
    assert missing == []
