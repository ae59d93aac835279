"""DeepSeek-V2 and V3 of a Hugging Face `config.json`: latent attention, dense layers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phloem.config.hf_rope import rope_config, yarn_growth
from phloem.config.hf_values import Json, as_int, need_int, positive
from phloem.config.mla import MLAConfig
from phloem.config.model import LayerSpec, RopeConfig, RopeKind
from phloem.core.errors import ConfigError

__all__ = ["deepseek"]


def deepseek(raw: Json) -> dict[str, Any]:
    """The fields of ModelConfig in which they differ from a plain Llama. Raises ConfigError."""
    _refuse_experts(raw)
    if raw.get("attention_bias"):
        raise ConfigError(f"attention_bias is not supported for {raw.get('model_type')} models")
    q_rank = raw.get("q_lora_rank")
    interleaved = raw.get("rope_interleave", True)
    mla = MLAConfig(
        kv_rank=need_int(raw, "kv_lora_rank"),
        q_rank=None if q_rank is None else as_int("q_lora_rank", q_rank),
        nope_dim=need_int(raw, "qk_nope_head_dim"),
        rope_dim=need_int(raw, "qk_rope_head_dim"),
        v_dim=need_int(raw, "v_head_dim"),
        # V2's attention knows no other order, whatever its config says
        rope_interleaved=raw.get("model_type") == "deepseek_v2" or bool(interleaved),
    )
    rope = rope_config(raw)
    head_dim = mla.nope_dim + mla.rope_dim
    return {
        "layers": (LayerSpec(),) * need_int(raw, "num_hidden_layers"),
        "num_kv_heads": 1,
        "head_dim": head_dim,
        "mla": mla,
        "rope": rope,
        "query_scale": head_dim**-0.5 * _score_growth(raw, rope),
    }


def _score_growth(raw: Json, rope: RopeConfig) -> float:
    """With `mscale_all_dim` a stretched context's scores grow, those without position as well."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or rope.kind is RopeKind.DEFAULT:
        return 1.0
    weight = positive(scaling, "mscale_all_dim")
    return 1.0 if weight is None else yarn_growth(rope.factor, weight) ** 2


def _refuse_experts(raw: Json) -> None:
    """All layers but the first ones are mixtures of experts, unless there are no experts."""
    experts = raw.get("n_routed_experts", "many")
    count = need_int(raw, "num_hidden_layers")
    first = raw.get("first_k_dense_replace")
    dense = 0 if first is None else as_int("first_k_dense_replace", first)
    if experts in (None, 0) or dense >= count:
        return
    raise ConfigError(
        f"layers {dense} to {count - 1} of this {raw.get('model_type')} model are mixtures of "
        f"{experts} experts, which are not supported yet; only checkpoints all of whose layers "
        f"have a dense MLP load (first_k_dense_replace {count}, or n_routed_experts null)"
    )
