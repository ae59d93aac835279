"""Cache and weights under an operator's hands: what reaches the engine, what is refused."""

from __future__ import annotations

import pytest

from phloem.engine import commands
from phloem.server import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.http import client


async def test_each_endpoint_is_one_command() -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        answers = [
            await http.post("/cache/verify"),
            await http.post("/cache/clear"),
            await http.post("/cache/clear", json={"storage": True}),
            await http.post("/cache/storage", json={"directory": "/kept", "size": "3GiB"}),
            await http.delete("/cache/storage"),
            await http.post("/update_weights_from_disk", json={"model_path": "/new"}),
        ]
    assert [answer.status_code for answer in answers] == [200] * 6
    assert engine.commands == [
        commands.VerifyCache(),
        commands.ClearCache(storage=False),
        commands.ClearCache(storage=True),
        commands.AttachStorage("/kept", 3 << 30),
        commands.DetachStorage(),
        commands.UpdateWeights("/new"),
    ]
    assert answers[-1].json()["success"] is True


async def test_a_listing_shows_the_text_that_a_prefix_begins_with() -> None:
    async with client(FakeEngine()) as http:
        answer = await http.get("/cache/ls", params={"limit": 5})
    assert answer.json()["prefixes"][0]["text"] == "hello"


async def test_decisions_of_all_or_of_one_request() -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        every = await http.get("/cache/decisions")
        one = await http.get("/cache/decisions", params={"request_id": "chatcmpl-1", "limit": 3})
    assert every.status_code == 200
    assert one.json()["decisions"] == [{"request_id": "1"}]
    assert engine.commands == [
        commands.ListDecisions(20, None),
        commands.ListDecisions(3, "1"),
    ]


async def test_how_steps_read_remote_pages() -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        assert (await http.get("/cache/remote", params={"limit": 7})).status_code == 200
        assert (await http.get("/cache/remote", params={"limit": "x"})).status_code == 400
    assert engine.commands == [commands.ListRemote(7)]


async def test_stats_count_tokens_by_their_source() -> None:
    async with client(FakeEngine()) as http:
        answer = (await http.get("/cache/stats")).json()
    assert set(answer["cached_tokens"]) == {"device", "remote", "host", "storage"}
    assert answer["cache"]["page_size"] == 4
    assert answer["cache"]["replicas"]["dropped_pages_total"] == {"room": 4, "cold": 2}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/cache/storage", {}, "directory"),
        ("/cache/storage", {"directory": "/kept", "size": "lots"}, "size"),
        ("/cache/storage", {"directory": ""}, "directory"),
        ("/cache/clear", {"storage": "yes"}, "storage"),
        ("/update_weights_from_disk", {"model_path": 7}, "model_path"),
    ],
)
async def test_bad_bodies_name_the_field(path: str, body: dict[str, object], param: str) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert engine.commands == []


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1001"])
@pytest.mark.parametrize("path", ["/cache/ls", "/cache/decisions"])
async def test_a_bad_limit_is_refused(limit: str, path: str) -> None:
    async with client(FakeEngine()) as http:
        assert (await http.get(path, params={"limit": limit})).status_code == 400


async def test_the_engines_refusal_comes_through() -> None:
    async with client(FakeEngine()) as http:
        answer = await http.post("/cache/storage", json={"directory": "/refused"})
    assert answer.status_code == 400
    assert "no host tier" in answer.json()["error"]["message"]


async def test_they_need_the_key() -> None:
    async with client(FakeEngine(), ServerSettings(api_key="k")) as http:
        assert (await http.post("/cache/clear")).status_code == 401
        assert (await http.get("/cache/ls")).status_code == 401
        assert (await http.get("/cache/decisions")).status_code == 401
