"""Hugging Face `config.json` -> ModelConfig. The only reader of that format's spellings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phloem.config.model import LayerSpec, ModelConfig, RopeConfig, RopeKind
from phloem.core.errors import ConfigError

__all__ = ["HF_FAMILIES", "model_config_from_hf", "read_hf_config"]

_Json = Mapping[str, Any]
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}


def _llama(raw: _Json) -> dict[str, Any]:
    if raw.get("mlp_bias"):
        raise ConfigError("mlp_bias is not supported for llama models")
    bias = bool(raw.get("attention_bias", False))
    return {"qkv_bias": bias, "out_bias": bias}


def _mistral(raw: _Json) -> dict[str, Any]:
    del raw
    return {}


def _qwen2(raw: _Json) -> dict[str, Any]:
    del raw
    return {"qkv_bias": True}


def _qwen3(raw: _Json) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias", False))
    return {"qkv_bias": bias, "out_bias": bias, "qk_norm": True}


# model_type -> the switches it sets; its weights are described in phloem/models/<model_type>.py
HF_FAMILIES: dict[str, Callable[[_Json], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def read_hf_config(folder: Path) -> ModelConfig:
    """The model of a checkpoint folder. Raises ConfigError for what is absent or unsupported."""
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    extra = _read_json(generation) if generation.is_file() else {}
    return model_config_from_hf(raw, generation=extra, name=folder.name)


def model_config_from_hf(
    raw: _Json, *, generation: _Json | None = None, name: str = ""
) -> ModelConfig:
    """Translate a parsed `config.json`; `generation` may add end-of-sequence ids."""
    family = raw.get("model_type")
    if family not in HF_FAMILIES:
        known = ", ".join(sorted(HF_FAMILIES))
        raise ConfigError(f"unsupported model_type {family!r} in config.json; supported: {known}")
    _refuse_unsupported(raw)
    heads = _int(raw, "num_attention_heads")
    hidden = _int(raw, "hidden_size")
    kv_heads = raw.get("num_key_value_heads")
    head_dim = raw.get("head_dim")
    eos = _ids(raw.get("eos_token_id")) + _ids((generation or {}).get("eos_token_id"))
    bos = _ids(raw.get("bos_token_id"))
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16")
    return ModelConfig(
        architecture=family,
        vocab_size=_int(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_int(raw, "intermediate_size"),
        layers=(LayerSpec(),) * _int(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else _as_int("num_key_value_heads", kv_heads),
        head_dim=hidden // max(heads, 1) if head_dim is None else _as_int("head_dim", head_dim),
        rope=_rope(raw),
        norm_eps=_float(raw, "rms_norm_eps", 1e-6),
        max_position=_int(raw, "max_position_embeddings"),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_ids=tuple(dict.fromkeys(eos)),
        bos_id=bos[0] if bos else None,
        dtype=_DTYPES.get(dtype, "bf16"),
        name=name,
        **HF_FAMILIES[family](raw),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; a checkpoint folder needs it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _refuse_unsupported(raw: _Json) -> None:
    if raw.get("quantization_config"):
        method = dict(raw["quantization_config"]).get("quant_method", "unknown")
        raise ConfigError(
            f"the checkpoint is quantised ({method}); only fp32, fp16 and bf16 safetensors load"
        )
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {act!r} is not supported, only silu")
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ConfigError("partial_rotary_factor other than 1 is not supported")
    window = raw.get("sliding_window")
    # Qwen writes a sliding_window that `use_sliding_window: false` switches off.
    if window is not None and raw.get("use_sliding_window", True):
        raise ConfigError(f"sliding window attention (sliding_window={window}) is not supported")
    kinds = set(raw.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ConfigError(f"layer types {sorted(kinds)} are not supported, only full_attention")


def _rope(raw: _Json) -> RopeConfig:
    """Both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"RoPE parameters must be a JSON object, got {scaling!r}")
    if scaling.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ConfigError("partial_rotary_factor other than 1 is not supported")
    theta = _float(scaling, "rope_theta", _float(raw, "rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in (None, "default"):
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=RopeKind.LINEAR, factor=_float(scaling, "factor", None))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=RopeKind.LLAMA3,
            factor=_float(scaling, "factor", None),
            low_freq_factor=_float(scaling, "low_freq_factor", None),
            high_freq_factor=_float(scaling, "high_freq_factor", None),
            original_max_position=_int(scaling, "original_max_position_embeddings"),
        )
    raise ConfigError(f"RoPE type {kind!r} is not supported; supported: default, linear, llama3")


def _as_int(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} in config.json must be an integer, got {value!r}")
    return value


def _int(raw: _Json, name: str) -> int:
    if name not in raw:
        raise ConfigError(f"config.json has no {name}")
    return _as_int(name, raw[name])


def _float(raw: _Json, name: str, default: float | None) -> float:
    value = raw.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{name} in config.json must be a number, got {value!r}")
    return float(value)


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    return tuple(_as_int("a token id", item) for item in values)
