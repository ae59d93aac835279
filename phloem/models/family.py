"""What differs between families of decoders: names of their weights, and switches.

A family is a module of this package named like its architecture, with one `FAMILY` in it. It is
found by that name; no list has to be edited.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

from phloem.core.errors import ConfigError

__all__ = ["GGUF_NAMES", "HF_NAMES", "Family", "WeightNames", "family_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Names of a checkpoint's modules; `{i}` stands for the layer.

    A module's tensors are named `.weight` and `.bias`; `sinks` names a tensor. `latent`: the module
    of latent attention, whose parts have the same names in all families that have it.
    """

    embedding: str
    norm: str
    head: str
    attn_norm: str
    q: str
    k: str
    v: str
    out: str
    q_norm: str
    k_norm: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    post_attn_norm: str
    post_mlp_norm: str
    sinks: str
    latent: str = "model.layers.{i}.self_attn"


HF_NAMES = WeightNames(
    embedding="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    attn_norm="model.layers.{i}.input_layernorm",
    q="model.layers.{i}.self_attn.q_proj",
    k="model.layers.{i}.self_attn.k_proj",
    v="model.layers.{i}.self_attn.v_proj",
    out="model.layers.{i}.self_attn.o_proj",
    q_norm="model.layers.{i}.self_attn.q_norm",
    k_norm="model.layers.{i}.self_attn.k_norm",
    mlp_norm="model.layers.{i}.post_attention_layernorm",
    gate="model.layers.{i}.mlp.gate_proj",
    up="model.layers.{i}.mlp.up_proj",
    down="model.layers.{i}.mlp.down_proj",
    post_attn_norm="model.layers.{i}.post_attention_layernorm",
    post_mlp_norm="model.layers.{i}.post_feedforward_layernorm",
    sinks="model.layers.{i}.self_attn.sinks",
)

GGUF_NAMES = WeightNames(
    embedding="token_embd",
    norm="output_norm",
    head="output",
    attn_norm="blk.{i}.attn_norm",
    q="blk.{i}.attn_q",
    k="blk.{i}.attn_k",
    v="blk.{i}.attn_v",
    out="blk.{i}.attn_output",
    q_norm="blk.{i}.attn_q_norm",
    k_norm="blk.{i}.attn_k_norm",
    mlp_norm="blk.{i}.ffn_norm",
    gate="blk.{i}.ffn_gate",
    up="blk.{i}.ffn_up",
    down="blk.{i}.ffn_down",
    post_attn_norm="blk.{i}.post_attention_norm",
    post_mlp_norm="blk.{i}.post_ffw_norm",
    sinks="blk.{i}.attn_sinks.weight",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How checkpoints of one architecture spell their weights.

    `gguf_interleaves_qk`: GGUF stores the rows of q and k with the two halves of each head
    interleaved (for a rotation of neighbours); loading undoes it. `hf_norm_offset`: added to the
    weights of norms of Hugging Face files, which then are kept in fp32.
    """

    architecture: str
    hf: WeightNames = HF_NAMES
    gguf: WeightNames = GGUF_NAMES
    gguf_interleaves_qk: bool = False
    hf_norm_offset: float = 0.0


def family_of(architecture: str) -> Family:
    """The family of that name. Raises ConfigError if there is no file for it."""
    module = f"phloem.models.{architecture}"
    if not architecture.isidentifier() or importlib.util.find_spec(module) is None:
        raise ConfigError(f"no model family {architecture!r}")
    family = getattr(importlib.import_module(module), "FAMILY", None)
    if not isinstance(family, Family):
        raise ConfigError(f"no model family {architecture!r}")
    return family
