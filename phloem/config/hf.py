"""Hugging Face `config.json` -> ModelConfig. The only reader of that format's spellings.

What a `model_type` adds to the fields that all share is in `hf_families`, RoPE in `hf_rope`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phloem.config.hf_families import HF_FAMILIES, text_config
from phloem.config.hf_rope import rope_config
from phloem.config.hf_values import Json, as_int, need_float, need_int, token_ids
from phloem.config.model import Activation, ModelConfig
from phloem.core.errors import ConfigError

__all__ = ["model_config_from_hf", "read_hf_config"]

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


def read_hf_config(folder: Path) -> ModelConfig:
    """The model of a checkpoint folder. Raises ConfigError for what is absent or unsupported."""
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    extra = _read_json(generation) if generation.is_file() else {}
    return model_config_from_hf(raw, generation=extra, name=folder.name)


def model_config_from_hf(
    raw: Json, *, generation: Json | None = None, name: str = ""
) -> ModelConfig:
    """Translate a parsed `config.json`; `generation` may add end-of-sequence ids."""
    family = raw.get("model_type")
    if family not in HF_FAMILIES:
        known = ", ".join(sorted(HF_FAMILIES))
        raise ConfigError(f"unsupported model_type {family!r} in config.json; supported: {known}")
    raw = text_config(raw)
    _refuse_unsupported(raw)
    heads, hidden = need_int(raw, "num_attention_heads"), need_int(raw, "hidden_size")
    kv_heads, head_dim = raw.get("num_key_value_heads"), raw.get("head_dim")
    eos = token_ids(raw.get("eos_token_id")) + token_ids((generation or {}).get("eos_token_id"))
    bos = token_ids(raw.get("bos_token_id"))
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16")
    own = HF_FAMILIES[family](raw)
    shared: dict[str, Any] = {
        "vocab_size": need_int(raw, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": need_int(raw, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else as_int("num_key_value_heads", kv_heads),
        "head_dim": hidden // max(heads, 1) if head_dim is None else as_int("head_dim", head_dim),
        "norm_eps": need_float(raw, "rms_norm_eps", 1e-6),
        "max_position": need_int(raw, "max_position_embeddings"),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "activation": _activation(raw),
        "eos_ids": tuple(dict.fromkeys(eos)),
        "bos_id": bos[0] if bos else None,
        "dtype": _DTYPES.get(dtype, "bf16"),
    }
    if "rope" not in own:
        shared["rope"] = rope_config(raw)
    return ModelConfig(architecture=family, name=name, **{**shared, **own})


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


def _refuse_unsupported(raw: Json) -> None:
    if raw.get("quantization_config"):
        method = dict(raw["quantization_config"]).get("quant_method", "unknown")
        raise ConfigError(
            f"the checkpoint is quantised ({method}); only fp32, fp16 and bf16 safetensors load"
        )
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ConfigError("partial_rotary_factor other than 1 is not supported")


def _activation(raw: Json) -> Activation:
    name = "hidden_activation" if raw.get("hidden_activation") else "hidden_act"
    value = raw.get(name) or "silu"
    if value not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise ConfigError(f"{name} {value!r} is not supported; supported: {known}")
    return _ACTIVATIONS[value]
