"""The load generator counts what the server reports, and reports failures instead of raising."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from phloem.bench.client import Answer, Client
from phloem.bench.prefix import PrefixOptions, num_steps, run_prefix
from phloem.bench.serve import LoadOptions, LoadReport, num_requests, run_load
from phloem.core.errors import ConfigError
from tests.bench.stub_server import StubServer

OPTIONS = LoadOptions(
    requests=12, max_tokens=3, prefix_tokens=64, unique_tokens=16, groups=2, clients=3
)


async def load(server: StubServer, options: LoadOptions = OPTIONS) -> LoadReport:
    seen: list[Answer] = []
    async with Client("http://stub/v1/", transport=server.transport) as client:
        model = await client.first_model()
        report = await run_load(client, model, options, on_answer=seen.append)
    assert len(seen) == len(report.answers)
    return report


def values(report: LoadReport) -> dict[str, float | None]:
    return {result.name: result.value for result in report.results()}


async def test_the_hit_rate_is_that_of_this_run() -> None:
    """12 prompts of 80 tokens in 2 groups: all but the first of a group find its 64 tokens."""
    report = await load(StubServer(), dataclasses.replace(OPTIONS, prompts="tokens", clients=1))
    got = values(report)
    assert got["requests"] == 12
    assert got["errors"] == 0
    assert got["prompt_tokens"] == 12 * 80
    assert got["cached_tokens"] == 10 * 64
    assert got["hit_rate"] == pytest.approx(10 * 64 / (12 * 80))
    assert got["output_tokens"] == 12 * 3


@pytest.mark.parametrize("prompts", ["chat", "text", "tokens"])
@pytest.mark.parametrize("workload", ["shared-prefix", "multi-turn", "long-document"])
async def test_every_workload_in_every_form_sends_what_was_asked(
    workload: str, prompts: str
) -> None:
    server = StubServer()
    options = dataclasses.replace(OPTIONS, workload=workload, prompts=prompts)
    report = await load(server, options)
    assert len(report.good) == len(server.bodies) == num_requests(options) == 12
    assert {("messages" in body) for body in server.bodies} == {prompts == "chat"}
    assert all(body["ignore_eos"] and body["stream"] for body in server.bodies)


async def test_a_chat_repeats_its_history_with_the_answers_it_got() -> None:
    server = StubServer()
    await load(server, dataclasses.replace(OPTIONS, workload="multi-turn", requests=3, turns=3))
    roles = [[m["role"] for m in body["messages"]] for body in server.bodies]
    assert roles[2] == ["user", "assistant", "user", "assistant", "user"]
    last = server.bodies[2]["messages"]
    assert last[1]["content"] == "w0 w1 w2 "
    assert server.bodies[1]["messages"] == last[:3]


async def test_failed_requests_are_counted_with_the_servers_words() -> None:
    report = await load(StubServer(fail_every=4))
    got = values(report)
    assert (got["requests"], got["errors"]) == (12, 3)
    assert report.errors[0] == "HTTP 503: no room"


async def test_a_server_that_reports_no_cached_tokens_has_no_hit_rate() -> None:
    got = values(await load(StubServer(report_cached=False)))
    assert got["hit_rate"] is None
    assert got["prompt_tokens"] is not None


async def test_open_loop_starts_at_seeded_times(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[list[float]] = []

    async def no_sleep(seconds: float) -> None:
        waits[-1].append(round(seconds, 1))

    monkeypatch.setattr("phloem.bench.serve.asyncio.sleep", no_sleep)
    for seed in (1, 1, 2):
        waits.append([])
        await load(StubServer(), dataclasses.replace(OPTIONS, clients=None, rate=0.01, seed=seed))
    assert len(waits[0]) == 12
    assert waits[0] == pytest.approx(waits[1], abs=0.2)
    assert waits[0] != pytest.approx(waits[2], abs=0.2)


@pytest.mark.parametrize(
    "bad",
    [
        {"clients": 2, "rate": 1.0},
        {"trace": "x"},
        {"workload": "trace"},
        {"requests": 0},
        {"max_tokens": 0},
        {"rate": 0.0},
    ],
)
def test_contradictory_or_senseless_options_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        LoadOptions(**bad)


async def test_prefix_bench_measures_a_hit_against_a_miss() -> None:
    server = StubServer()
    options = PrefixOptions(cached_tokens=64, new_tokens=16, pairs=2, decode_tokens=4, repeats=1)
    steps = itertools.count()
    async with Client("http://stub", transport=server.transport) as client:
        results = await run_prefix(client, "stub", options, on_step=lambda _: next(steps))
    assert next(steps) == num_steps(options)
    assert [result.name for result in results] == [
        "second_turn_ttft_over_cold",
        "cold_ttft_s",
        "second_turn_ttft_s",
        "prefill_512_tok_s",
        "prefill_2048_tok_s",
        "decode_b1_tok_s",
        "decode_b8_tok_s",
        "decode_b32_tok_s",
    ]
    assert set(results[0].samples) == {"second_turn_s", "cold_s"}


async def test_prefix_bench_refuses_to_time_a_hit_that_was_none() -> None:
    server = StubServer()
    server._match = lambda tokens: 0
    options = PrefixOptions(cached_tokens=128, new_tokens=16, pairs=1, repeats=1)
    async with Client("http://stub", transport=server.transport) as client:
        with pytest.raises(ConfigError, match="expected 128 cached tokens"):
            await run_prefix(client, "stub", options)
