"""Tiny random checkpoints: init 0.1, so that a wrong page shows (at 0.02 it often does not)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _llama(**extra: Any) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**{**_SIZES, **extra})


FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: _llama(tie_word_embeddings=False),
    "llama-tied": lambda: _llama(tie_word_embeddings=True, num_key_value_heads=4),
    "llama-bias": lambda: _llama(attention_bias=True, num_key_value_heads=1),
    "llama-rope3": lambda: _llama(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    ),
    "llama-linear": lambda: _llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
    ),
    # 12 KV heads: more than 8 head groups, so a group holds two heads
    "mistral": lambda: transformers.MistralConfig(
        **{**_SIZES, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 8},
        sliding_window=None,
    ),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=24),
}


def make_model(family: str, seed: int = 7, **sizes: int) -> transformers.PreTrainedModel:
    """A seeded random model in fp32; biases and norm weights are random too."""
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    config.update(sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(0.0, 0.5)
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5)
    return model


def make_checkpoint(
    family: str, folder: Path, *, max_shard_size: str = "5GB", seed: int = 7
) -> transformers.PreTrainedModel:
    """Write the model of `family` to `folder` and return it."""
    model = make_model(family, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
