"""Tiny GGUF files written from a transformers model, as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind

_SUFFIXES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    layer, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_SUFFIXES[rest]}.{kind}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order of q and k rows in llama GGUF files: halves of a head alternate."""
    out = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(out.swapaxes(1, 2)).reshape(rows.shape)


def write_gguf(
    model: torch.nn.Module,
    path: Path,
    *,
    kind: Kind = Kind.F32,
    kinds: Mapping[str, Kind] | None = None,
    rope_factors: bool = False,
) -> None:
    """Write `model`; vectors in F32, matrices in `kind`, or in that of the last matching pattern
    of `kinds` (of names as in the file)."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = config.head_dim if arch == "qwen3" else 0
    if head_dim:
        writer.add_key_length(head_dim)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_eos_token_id(1)
    if rope_factors:
        base = model.model.rotary_emb.original_inv_freq
        theta = config.rope_parameters["rope_theta"]
        plain = 1.0 / theta ** (torch.arange(len(base)).float() / len(base))
        writer.add_tensor("rope_freqs.weight", (plain / base).numpy())
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.numpy()
        if arch == "llama" and ".q_proj." in name:
            data = interleave(data, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            data = interleave(data, config.num_key_value_heads)
        chosen = kind
        for pattern, other in (kinds or {}).items():
            chosen = other if fnmatch(gguf_name(name), pattern) else chosen
        if data.ndim == 1 or chosen is Kind.F32:
            writer.add_tensor(gguf_name(name), data)
        else:
            raw = gguf.quants.quantize(data, chosen)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
