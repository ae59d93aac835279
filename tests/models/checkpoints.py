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
    "llama-yarn": lambda: _llama(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=24),
}


def _mistral(window: int, **extra: Any) -> transformers.PretrainedConfig:
    return transformers.MistralConfig(**{**_SIZES, "head_dim": 16, **extra}, sliding_window=window)


def _qwen2(window: int, **extra: Any) -> transformers.PretrainedConfig:
    """Of three layers the first one sees all."""
    more = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": window, **extra}
    return transformers.Qwen2Config(**{**_SIZES, **more})


def _gemma2(window: int, **extra: Any) -> transformers.PretrainedConfig:
    """Window, full, window; caps so low that they bend most scores."""
    more = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": window}
    more |= {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0, **extra}
    return transformers.Gemma2Config(**{**_SIZES, **more})


def _gemma3(window: int, **extra: Any) -> transformers.PretrainedConfig:
    """Two layers with a window, then one without; two RoPE bases, the global one stretched."""
    more = {"head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": window}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    }
    more |= {"layer_types": kinds, "rope_parameters": ropes, **extra}
    return transformers.Gemma3TextConfig(**{**_SIZES, **more})


def _gpt_oss(window: int, **extra: Any) -> transformers.PretrainedConfig:
    """Window and full by turns; YaRN whose ramp lies between whole pairs."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 150.0,
        "factor": 8.0,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    }
    more = {"head_dim": 16, "sliding_window": window, "rope_parameters": rope}
    sizes = {**_SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, **more, **extra}
    return transformers.GptOssConfig(**sizes)


# Families with windows: the window (and other fields) -> config.
WINDOWED: dict[str, Callable[..., transformers.PretrainedConfig]] = {
    "mistral": _mistral,
    "qwen2": _qwen2,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
}


_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}


def _deepseek(kind: type[transformers.PretrainedConfig], **extra: Any) -> Any:
    """Every part has a size of its own; all layers are dense."""
    more = {"num_key_value_heads": 4, "first_k_dense_replace": 3, "q_lora_rank": 24}
    more |= {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20}
    return kind(**{**_SIZES, **more, **extra})


# Families with latent attention, by what is special about them.
LATENT: dict[str, Callable[..., transformers.PretrainedConfig]] = {
    "v2-lite": lambda **x: _deepseek(transformers.DeepseekV2Config, q_lora_rank=None, **x),
    "v2-yarn": lambda **x: _deepseek(
        transformers.DeepseekV2Config,
        rope_parameters={**_YARN, "mscale": 0.9, "mscale_all_dim": 0.4},
        **x,
    ),
    "v3": lambda **x: _deepseek(transformers.DeepseekV3Config, v_head_dim=44, **x),
    "v3-yarn": lambda **x: _deepseek(
        transformers.DeepseekV3Config,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        **x,
    ),
    "v3-halves": lambda **x: _deepseek(
        transformers.DeepseekV3Config, q_lora_rank=None, rope_interleave=False, **x
    ),
}


class DenseMLP(torch.nn.Module):
    """Stands in for the experts of gpt-oss, in transformers' model and in ours."""

    def __init__(self, config: transformers.PretrainedConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = torch.nn.Linear(hidden, inner, bias=False)
        self.up_proj = torch.nn.Linear(hidden, inner, bias=False)
        self.down_proj = torch.nn.Linear(inner, hidden, bias=False)
        for linear in (self.gate_proj, self.up_proj, self.down_proj):
            torch.nn.init.normal_(linear.weight, std=config.initializer_range)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        gate = torch.nn.functional.silu(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x)), None


def build_model(
    config: transformers.PretrainedConfig, seed: int = 7
) -> transformers.PreTrainedModel:
    """A seeded random model in fp32; biases, norm weights and sinks are random too."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if isinstance(config, transformers.GptOssConfig):
        for layer in model.model.layers:
            layer.mlp = DenseMLP(config)
        model.config.num_local_experts = 0
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(0.0, 0.5)
            elif name.endswith("sinks"):
                tensor.normal_(0.0, 1.5)
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5)
    return model


def make_model(family: str, seed: int = 7, **sizes: int) -> transformers.PreTrainedModel:
    """The random model of one of `FAMILIES`; `sizes` replace fields of its config."""
    config = FAMILIES[family]()
    config.update(sizes)
    return build_model(config, seed)


def make_checkpoint(
    family: str, folder: Path, *, max_shard_size: str = "5GB", seed: int = 7
) -> transformers.PreTrainedModel:
    """Write the model of `family` to `folder` and return it."""
    model = make_model(family, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def make_windowed(
    family: str, folder: Path, *, window: int, seed: int = 7, **extra: Any
) -> transformers.PreTrainedModel:
    """Write a model with a window to `folder` and return it."""
    model = build_model(WINDOWED[family](window, **extra), seed)
    model.save_pretrained(folder)
    return model


def make_latent(
    family: str, folder: Path, *, seed: int = 7, **extra: Any
) -> transformers.PreTrainedModel:
    """Write a model of `LATENT` to `folder` and return it."""
    model = build_model(LATENT[family](**extra), seed)
    model.save_pretrained(folder)
    return model


def make_wide(kind: str, folder: Path) -> bool:
    """Write a model of any kind (windows are of 8 tokens) whose MLP is so wide that each of two
    ranks has whole panels of it. Whether it has windows."""
    if kind in LATENT:
        make_latent(kind, folder, intermediate_size=128)
    elif kind in WINDOWED:
        make_windowed(kind, folder, window=8, intermediate_size=128)
    else:
        make_model(kind, intermediate_size=128).save_pretrained(folder)
    return kind in WINDOWED
