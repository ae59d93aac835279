"""The whole profile on a tiny random model, in the real two processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from phloem.bench.profile import ProfileOptions, run_profile
from phloem.bench.profile.spans import SPANS_FILE
from phloem.core.errors import ConfigError
from tests.engine.fakes import byte_tokenizer
from tests.models.checkpoints import make_checkpoint

# What a step must have passed through, whichever kernels compute it.
PARTS = {
    "scheduler: plan",
    "scheduler: apply",
    "scheduler: loop",
    "ipc: encode, send",
    "ipc: receive, decode",
    "detokenizer: detokenizer",
    "inputs: tensors",
    "inputs: attention plan",
    "head: output head",
    "sampler: sampler",
}


@pytest.mark.timeout(300)
def test_a_step_is_seen_in_both_processes(tmp_path: Path) -> None:
    """Every part of the way of a token has its row; a part that lost its point would be missing."""
    folder = tmp_path / "tiny"
    make_checkpoint("llama", folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    out = tmp_path / "trace.json"
    options = ProfileOptions(
        model=str(folder),
        dtype="fp32",
        kernels="torch",
        threads=1,
        batches="2",
        context=16,
        tokens=24,
        out=str(out),
    )
    results, facts = run_profile(options)
    assert facts["kernels"] == "torch"
    values = {result.name: result.value for result in results}
    named = {name.split(" ", 1)[1].split(" (x")[0] for name in values if " (x" in name}
    assert named >= PARTS
    assert values["b2_outside_model_ms"] > 0
    assert values["b2_step_ms"] > 0
    events = json.loads(out.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"engine", "front"}
    assert SPANS_FILE not in os.environ


def test_too_few_tokens_for_a_steady_state_are_refused() -> None:
    with pytest.raises(ConfigError, match="--tokens"):
        ProfileOptions(tokens=8)
