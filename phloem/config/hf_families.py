"""What each `model_type` of a Hugging Face `config.json` means beyond the fields that all share.

A family is one function: the parsed file -> those fields of ModelConfig in which it differs from a
plain Llama. Its weights are described in phloem/models/<model_type>.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from phloem.config.hf_deepseek import deepseek
from phloem.config.hf_rope import rope_config, rope_of_kind
from phloem.config.hf_values import Json, as_int, need_float, need_int, positive
from phloem.config.model import Activation, LayerSpec
from phloem.core.errors import ConfigError

__all__ = ["HF_FAMILIES", "text_config"]

_Fields = dict[str, Any]
_FULL, _WINDOW = "full_attention", "sliding_attention"

# What transformers takes for what the text part of a gemma3 config leaves out.
_GEMMA3_TEXT = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}


def text_config(raw: Json) -> Json:
    """The language model of a config that also has other parts; `raw` itself, if it has none."""
    text = raw.get("text_config")
    if raw.get("model_type") != "gemma3" or not isinstance(text, dict):
        return raw
    outer = {key: raw[key] for key in ("eos_token_id", "bos_token_id", "dtype") if key in raw}
    if "torch_dtype" in raw:
        outer["torch_dtype"] = raw["torch_dtype"]
    return {**_GEMMA3_TEXT, **outer, **text, "model_type": "gemma3"}


def _llama(raw: Json) -> _Fields:
    if raw.get("mlp_bias"):
        raise ConfigError("mlp_bias is not supported for llama models")
    if raw.get("sliding_window") is not None:
        raise ConfigError(
            f"llama models have no sliding window (sliding_window={raw['sliding_window']})"
        )
    layers = _layers(raw, None, lambda _: False)
    return {"layers": layers, **_biases(raw, default=False)}


def _mistral(raw: Json) -> _Fields:
    """A window, if there is one, on every layer."""
    window = _window(raw)
    layers = _layers(raw, window, lambda _: window is not None)
    if len(set(layers)) > 1:
        raise ConfigError("mistral models have a window on all layers or on none")
    return {"layers": layers}


def _qwen2(raw: Json) -> _Fields:
    return {"layers": _qwen_layers(raw), "qkv_bias": True}


def _qwen3(raw: Json) -> _Fields:
    return {"layers": _qwen_layers(raw), "qk_norm": True, **_biases(raw, default=False)}


def _qwen_layers(raw: Json) -> tuple[LayerSpec, ...]:
    """The first `max_window_layers` see all. `use_sliding_window: false` switches a window off."""
    window = _window(raw) if raw.get("use_sliding_window", False) else None
    first = need_int(raw, "max_window_layers", 28)
    return _layers(raw, window, lambda i: window is not None and i >= first)


def _gemma2(raw: Json) -> _Fields:
    fields = _gemma(raw)
    return {**fields, "layers": _layers(raw, _window(raw), lambda i: i % 2 == 0)}


def _gemma3(raw: Json) -> _Fields:
    """Every sixth layer sees all; those with a window have a RoPE base of their own."""
    every = need_int(raw, "sliding_window_pattern", 6)
    if every < 1:
        raise ConfigError(f"sliding_window_pattern must be at least 1, got {every}")
    newer = raw.get("rope_parameters") or {}
    by_kind = newer if isinstance(newer, dict) and (_FULL in newer or _WINDOW in newer) else None
    full_theta = need_float(raw, "rope_theta", 1_000_000.0)
    window_theta = need_float(raw, "rope_local_base_freq", 10_000.0)
    return {
        **_gemma(raw),
        "layers": _layers(raw, _window(raw), lambda i: (i + 1) % every != 0),
        "qk_norm": True,
        "rope": rope_config(raw, theta=full_theta)
        if by_kind is None
        else rope_of_kind(by_kind.get(_FULL) or {}, raw, theta=full_theta),
        "window_rope": rope_of_kind(
            {} if by_kind is None else by_kind.get(_WINDOW) or {}, raw, theta=window_theta
        ),
    }


def _gemma(raw: Json) -> _Fields:
    """What Gemma 2 and 3 share."""
    if raw.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention is not supported")
    unsaid = not raw.get("hidden_activation") and not raw.get("hidden_act")
    return {
        **({"activation": Activation.GELU_TANH} if unsaid else {}),
        **_biases(raw, default=False),
        "query_scale": need_float(raw, "query_pre_attn_scalar", 256.0) ** -0.5,
        "attn_softcap": positive(raw, "attn_logit_softcapping"),
        "final_softcap": positive(raw, "final_logit_softcapping"),
        "post_norms": True,
        "embedding_scale": math.sqrt(need_int(raw, "hidden_size")),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def _gpt_oss(raw: Json) -> _Fields:
    """Attention of gpt-oss. Its experts are not there yet: only a dense stand-in for them."""
    if need_int(raw, "num_local_experts", 128) != 0:
        raise ConfigError(
            "gpt_oss models are mixtures of experts, which are not supported yet; only "
            "checkpoints with num_local_experts 0 and a dense MLP in their place load"
        )
    return {
        **_biases(raw, default=True),
        "layers": _layers(raw, _window(raw), lambda i: i % 2 == 0),
        "rope": rope_config(raw, theta=150_000.0),
        "sinks": True,
    }


def _biases(raw: Json, *, default: bool) -> _Fields:
    bias = bool(raw.get("attention_bias", default))
    return {"qkv_bias": bias, "out_bias": bias}


def _window(raw: Json) -> int | None:
    window = raw.get("sliding_window")
    return None if window is None else as_int("sliding_window", window)


def _layers(
    raw: Json, window: int | None, has_window: Callable[[int], bool]
) -> tuple[LayerSpec, ...]:
    """Layers as `layer_types` says; without it, those of which `has_window` is true."""
    count = need_int(raw, "num_hidden_layers")
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = [_WINDOW if has_window(i) else _FULL for i in range(count)]
    unknown = sorted(set(map(str, kinds)) - {_FULL, _WINDOW})
    if unknown:
        raise ConfigError(f"layer types {unknown} are not supported, only {_FULL} and {_WINDOW}")
    if len(kinds) != count:
        raise ConfigError(f"layer_types names {len(kinds)} layers, num_hidden_layers {count}")
    if _WINDOW in kinds and window is None:
        raise ConfigError(f"layer_types says {_WINDOW}, but there is no sliding_window in use")
    return tuple(LayerSpec(window=window if kind == _WINDOW else None) for kind in kinds)


HF_FAMILIES: dict[str, Callable[[Json], _Fields]] = {
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
