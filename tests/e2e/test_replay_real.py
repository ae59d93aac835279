"""Traces through the real engine cache exactly what they cache in the simulator."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import transformers

from phloem.cli import replay
from phloem.sim import read_trace

ROOT = Path(__file__).resolve().parents[2]
MINI = Path(os.environ.get("PHLOEM_SHARED", ROOT.parent / "shared")) / "data" / "mini"
LIMIT = 100

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not MINI.is_dir(), reason=f"no traces at {MINI}"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two small layers that takes prompts of 8,192 tokens."""
    path = tmp_path_factory.mktemp("replay") / "llama"
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        initializer_range=0.1,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def document(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, object]:
    """The last line of `phloem replay --json`, less the trace's own rows."""
    assert replay.run([*args, "--limit", str(LIMIT), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("name", ["claude_code_16sessions", "conversation_1000", "synthetic_1000"])
def test_the_real_engine_caches_what_the_trace_says(
    tiny: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Room for all: the sum over the first 100 requests is the expected one."""
    trace = MINI / f"{name}.jsonl"
    rows = [json.loads(line) for line in trace.read_text().splitlines()[:LIMIT]]
    real = document(capsys, str(trace), "--model", str(tiny), "--pages", "16384")
    assert real["requests"] == LIMIT
    assert real["refused"] == 0
    assert real["prompt_tokens"] == sum(row["input_length"] for row in rows)
    assert real["cached_tokens"] == sum(row["expect_cached_infinite"] for row in rows)


def test_the_real_engine_evicts_what_the_simulator_evicts(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = MINI / "claude_code_16sessions.jsonl"
    assert len(list(read_trace(trace))) > LIMIT
    args = (str(trace), "--pages", "512")
    simulated = document(capsys, *args)
    assert simulated["evicted_pages"] > 0
    assert document(capsys, *args, "--model", str(tiny)) == simulated
