"""Health, metrics, models, load, cache control, request ids and the API key."""

from __future__ import annotations

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from phloem.core.errors import ConfigError
from phloem.server import ServerSettings
from tests.server.fake_engine import FakeEngine, Gate
from tests.server.http import chat, client, completion

PROBES = ("/health", "/livez", "/ping", "/readyz", "/ready")


async def test_probes_tell_alive_from_ready() -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        assert [(await http.get(p)).status_code for p in PROBES] == [200] * 5
        assert [(await http.head(p)).status_code for p in PROBES] == [200] * 5
        engine.draining = True
        assert [(await http.get(p)).status_code for p in PROBES] == [200, 200, 200, 503, 503]
        engine.alive = False
        dead = [await http.get(p) for p in PROBES]
        assert [answer.status_code for answer in dead] == [503] * 5
        assert dead[0].json()["reason"] == "killed"


async def test_health_answers_at_once_while_the_engine_answers_nothing() -> None:
    engine = FakeEngine()
    engine.stats_gate = Gate()
    async with client(engine, ServerSettings(stats_timeout_s=0.05)) as http:
        await http.get("/health")
        times = []
        for _ in range(20):
            start = time.perf_counter()
            assert (await http.get("/health")).status_code == 200
            times.append(time.perf_counter() - start)
        metrics = await http.get("/metrics")
        load = await http.get("/load")
        info = await http.get("/server_info")
    assert min(times) < 0.005
    assert "phloem_engine_alive 1.0" in metrics.text
    assert "phloem_requests_running" not in metrics.text
    assert load.status_code == 503
    assert info.json()["stats"] is None


async def test_metrics_keep_the_last_figures_of_a_silent_engine() -> None:
    engine = FakeEngine()
    async with client(engine, ServerSettings(stats_timeout_s=0.05)) as http:
        await http.get("/metrics")
        engine.stats_gate = Gate()
        text = (await http.get("/metrics")).text
        engine.stats_gate = None
        engine.alive = False
        dead = (await http.get("/metrics")).text
    assert "phloem_requests_running 0.0" in text
    age = next(line for line in text.splitlines() if line.startswith("phloem_stats_age"))
    assert float(age.split()[1]) >= 0.05
    assert "phloem_engine_alive 0.0" in dead
    assert "phloem_requests_running 0.0" in dead


async def scrape(http: object) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = (await http.get("/metrics")).text
    out: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("phloem_")
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in out, f"{key} twice: one series per fact"
            out[key] = sample.value
    return out


async def test_metrics_add_up() -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        usages = []
        for prompt, budget in (("hello", 4), ("hi there", 7), ("x", 1)):
            answer = await http.post("/v1/completions", json=completion(prompt, max_tokens=budget))
            usages.append(answer.json()["usage"])
        await http.post("/v1/completions", json=completion(max_tokens=0))
        await http.get("/nowhere")
        got = await scrape(http)

    def one(name: str, **labels: str) -> float:
        return got[f"phloem_{name}", tuple(sorted(labels.items()))]

    def total(name: str) -> float:
        return sum(v for (n, _), v in got.items() if n == f"phloem_{name}")

    assert one("prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
    assert one("generated_tokens_total") == 12
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert total("cached_prompt_tokens_total") == cached
    assert total("cache_pages") == one("cache_capacity_pages") == 128
    assert one("evicted_tokens_total") == 5 * one("page_size_tokens")
    assert one("cache_pages", state="replica") == 3
    assert one("replica_bytes") == 3 * engine.card.page_bytes > 0
    assert one("replica_served_pages_total") == 70
    assert one("replica_made_pages_total") == 3 + total("replica_dropped_pages_total")
    assert one("time_to_first_token_seconds_count") == 3
    assert one("request_duration_seconds_count") == 3
    assert one("inter_token_latency_seconds_count") == 12 - 3
    assert one("time_to_first_token_seconds_bucket", le="+Inf") == 3
    assert one("http_requests_total", endpoint="/v1/completions", status="200") == 3
    assert one("http_requests_total", endpoint="/v1/completions", status="400") == 1
    assert one("http_requests_total", endpoint="unmatched", status="404") == 1
    assert one("requests_finished_total", reason="length") == 3


async def test_cache_control() -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        for method, path in (
            ("GET", "/flush_cache"),
            ("POST", "/flush_cache"),
            ("POST", "/reset_prefix_cache"),
        ):
            answer = await http.request(method, path)
            assert answer.json() == {"success": True, "locked_pages": 0}
    assert engine.flushed == 3


async def test_info_endpoints() -> None:
    async with client(FakeEngine(), ServerSettings(served_model_names=("one", "two/x"))) as http:
        models = (await http.get("/v1/models")).json()
        model = (await http.get("/v1/models/two/x")).json()
        info = (await http.get("/server_info")).json()
        legacy = (await http.get("/model_info")).json()
        load = (await http.get("/load")).json()
        loads = (await http.get("/v1/loads?include=core,queues")).json()
        version = (await http.get("/version")).json()
        renamed = await http.post("/v1/completions", json={**completion(), "model": "fake"})
    assert [m["id"] for m in models["data"]] == ["one", "two/x"]
    assert (model["id"], model["max_model_len"]) == ("two/x", 256)
    assert info["capacity_tokens"] == 512
    assert info["stats"]["cache"]["total_pages"] == 128
    assert legacy["model_path"] == "/models/fake"
    assert load == {"server_load": 0, "running": 0, "queued": 0}
    assert loads["loads"][0]["max_total_num_tokens"] == 512
    assert version["version"]
    assert renamed.status_code == 404


async def test_tokenize_and_back() -> None:
    async with client(FakeEngine()) as http:
        for prefix in ("", "/v1"):
            body = {"prompt": "h\u00e9"}
            tokens = (await http.post(f"{prefix}/tokenize", json=body)).json()
            assert tokens == {"tokens": [104, 195, 169], "count": 3, "max_model_len": 256}
            text = await http.post(f"{prefix}/detokenize", json={"tokens": tokens["tokens"]})
            assert text.json() == {"prompt": "h\u00e9", "text": "h\u00e9"}
        turns = [{"role": "developer", "content": [{"type": "text", "text": "a"}]}]
        chat_tokens = (await http.post("/tokenize", json={"messages": turns})).json()
        assert bytes(chat_tokens["tokens"]) == b"system:a\nassistant:"
        empty = await http.post("/tokenize", json={"prompt": "", "add_special_tokens": False})
        assert empty.json()["count"] == 0
        assert (await http.post("/detokenize", json={"tokens": []})).json()["text"] == ""


async def test_request_ids_are_echoed() -> None:
    engine = FakeEngine()
    path = "/v1/chat/completions"
    async with client(engine) as http:
        header = await http.post(path, json=chat(), headers={"x-request-id": "from-header"})
        body = await http.post(
            path, json=chat(request_id="from-body"), headers={"x-request-id": "from-header"}
        )
        none = await http.post(path, json=chat())
        odd = await http.post(path, json=chat(), headers={"x-request-id": "a b"})
        bad = await http.post(path, json=chat(max_tokens=0), headers={"x-request-id": "bad"})
    assert header.headers["x-request-id"] == "from-header"
    assert header.json()["id"] == "chatcmpl-from-header"
    assert body.headers["x-request-id"] == "from-body"
    assert engine.requests[1].request_id == "from-body"
    assert none.headers["x-request-id"] != odd.headers["x-request-id"]
    assert "a b" not in odd.headers["x-request-id"]
    assert (bad.status_code, bad.headers["x-request-id"]) == (400, "bad")


async def test_the_api_key_guards_all_but_probes_and_metrics() -> None:
    async with client(FakeEngine(), ServerSettings(api_key="secret")) as http:
        for path in (*PROBES, "/metrics", "/version", "/"):
            assert (await http.get(path)).status_code == 200
        for path in ("/v1/models", "/server_info", "/flush_cache", "/nowhere", "/openapi.json"):
            assert (await http.get(path)).status_code == 401
        for header in (
            {},
            {"authorization": "secret"},
            {"authorization": "Basic secret"},
            {"authorization": "Bearer secre"},
            {"authorization": "Bearer \u00e9".encode("latin-1").decode("latin-1").encode()},
        ):
            for path, body in (
                ("/v1/chat/completions", chat()),
                ("/generate", {"text": "a"}),
                ("/abort_request", {"rid": "a"}),
            ):
                answer = await http.post(path, json=body, headers=header)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        good = await http.get("/v1/models", headers={"authorization": "bearer secret"})
        assert good.status_code == 200


@pytest.mark.parametrize(
    "settings",
    [{"api_key": " "}, {"served_model_names": ("",)}, {"max_body_bytes": 0}, {"max_prompts": -1}],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**settings)


async def test_openapi_describes_every_endpoint() -> None:
    async with client(FakeEngine()) as http:
        document = (await http.get("/openapi.json")).json()
    chat_schema = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    properties = chat_schema["application/json"]["schema"]["properties"]
    assert {"messages", "temperature", "cache_salt", "stream_options"} <= set(properties)
    assert "$ref" not in str(chat_schema)
    assert {"/health", "/metrics", "/flush_cache", "/v1/models"} <= set(document["paths"])


async def test_the_page_loads_nothing_from_elsewhere() -> None:
    async with client(FakeEngine()) as http:
        answer = await http.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "http://" not in answer.text
    assert "https://" not in answer.text
    assert "innerHTML" not in answer.text
