"""Model configs from Hugging Face and GGUF: what is read, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phloem.config.gguf import GGUFFile, GGUFTensor, model_config_from_gguf
from phloem.config.hf import model_config_from_hf
from phloem.config.model import Activation, LayerSpec, RopeKind
from phloem.core.errors import ConfigError

LLAMA32: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}


def config(**changes: Any):
    raw = {**LLAMA32, **changes}
    return model_config_from_hf({k: v for k, v in raw.items() if v is not ...})


def test_llama_32_1b():
    c = config()
    assert (c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim) == (16, 32, 8, 64)
    assert c.rope.kind is RopeKind.LLAMA3
    assert (c.rope.theta, c.rope.factor, c.rope.original_max_position) == (500000.0, 32.0, 8192)
    assert c.eos_ids == (128001, 128008, 128009)
    assert c.num_parameters == 1_235_814_400  # as its model card says: 1.23B


def test_both_spellings_of_rope_are_the_same():
    newer = {**LLAMA32["rope_scaling"], "rope_theta": 500000.0}
    assert config(rope_theta=..., rope_scaling=..., rope_parameters=newer) == config()


def test_what_may_be_left_out():
    c = config(num_key_value_heads=..., head_dim=..., rope_scaling=..., rope_theta=...)
    assert (c.num_kv_heads, c.head_dim, c.rope.kind) == (32, 64, RopeKind.DEFAULT)
    assert c.rope.theta == 10000.0


def test_generation_config_adds_eos_ids():
    c = model_config_from_hf({**LLAMA32, "eos_token_id": 5}, generation={"eos_token_id": [7, 5]})
    assert c.eos_ids == (5, 7)


@pytest.mark.parametrize(
    ("family", "switches"),
    [
        ("llama", (False, False, False)),
        ("mistral", (False, False, False)),
        ("qwen2", (True, False, False)),
        ("qwen3", (False, False, True)),
    ],
)
def test_families_and_their_switches(family, switches):
    c = config(model_type=family)
    assert (c.qkv_bias, c.out_bias, c.qk_norm) == switches


def test_qwen_windows_that_are_switched_off_do_not_matter():
    c = config(model_type="qwen2", sliding_window=4096, use_sliding_window=False)
    assert {layer.window for layer in c.layers} == {None}


def windows(**changes: Any) -> list[int | None]:
    return [layer.window for layer in config(num_hidden_layers=4, **changes).layers]


def test_which_layers_have_a_window():
    """By number, and by `layer_types`, which goes before numbers."""
    assert windows(model_type="mistral", sliding_window=64) == [64] * 4
    assert windows(model_type="mistral", sliding_window=None) == [None] * 4
    qwen = {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}
    assert windows(**qwen, max_window_layers=3) == [None, None, None, 64]
    assert windows(**{**qwen, "use_sliding_window": False}, max_window_layers=3) == [None] * 4
    assert windows(model_type="gemma2", sliding_window=64) == [64, None, 64, None]
    gemma3 = {"model_type": "gemma3_text", "sliding_window": 64}
    assert windows(**gemma3, sliding_window_pattern=2) == [64, None, 64, None]
    assert windows(**gemma3) == [64] * 4
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    assert windows(**gemma3, layer_types=kinds) == [None, 64, None, None]
    assert windows(**qwen, layer_types=kinds) == [None, 64, None, None]
    gpt = {"model_type": "gpt_oss", "sliding_window": 64, "num_local_experts": 0}
    assert windows(**gpt) == [64, None, 64, None]


def test_components_of_the_layers():
    """Full first, whatever it holds; a window component only where there is a window."""
    mixed = config(model_type="gemma2", sliding_window=64, num_hidden_layers=4)
    assert (mixed.window, mixed.component_layers) == (64, ((1, 3), (0, 2)))
    spine = config(model_type="mistral", sliding_window=64, num_hidden_layers=2)
    assert (spine.window, spine.component_layers) == (64, ((), (0, 1)))
    plain = config(num_hidden_layers=2)
    assert (plain.window, plain.component_layers) == (None, ((0, 1),))


GEMMA3_4B: dict[str, Any] = {
    # What its config.json says; the rest is left to the reader.
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}


def test_gemma3_4b():
    c = model_config_from_hf(GEMMA3_4B)
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.vocab_size) == (8, 4, 256, 262208)
    assert [len(layers) for layers in c.component_layers] == [5, 29]
    assert (c.window, c.activation, c.tie_embeddings) == (1024, Activation.GELU_TANH, True)
    assert (c.rope.theta, c.rope.kind, c.rope.factor) == (1e6, RopeKind.LINEAR, 8.0)
    assert (c.window_rope.theta, c.window_rope.kind) == (1e4, RopeKind.DEFAULT)
    assert (c.score_scale, c.attn_softcap, c.final_softcap) == (256**-0.5, None, None)
    assert (c.eos_ids, c.qk_norm, c.post_norms) == ((1, 106), True, True)
    assert 3.8e9 < c.num_parameters < 3.9e9  # 4.3 B with the part that sees


def test_gemma3_in_the_newer_spelling_is_the_same():
    text = dict(GEMMA3_4B["text_config"])
    scaling = text.pop("rope_scaling")
    text["rope_parameters"] = {
        "full_attention": {**scaling, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    newer = {**GEMMA3_4B, "text_config": text}
    assert model_config_from_hf(newer) == model_config_from_hf(GEMMA3_4B)


def test_yarn_of_qwen25_and_gpt_oss():
    qwen = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    c = config(model_type="qwen2", rope_scaling=qwen)
    assert (c.rope.kind, c.rope.factor, c.rope.truncate) == (RopeKind.YARN, 4.0, True)
    assert c.rope.scale == pytest.approx(1.1386, abs=1e-4)
    gpt = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "beta_fast": 32.0}
    gpt["original_max_position_embeddings"] = 4096
    c = config(model_type="gpt_oss", num_local_experts=0, sliding_window=128, rope_scaling=gpt)
    assert (c.rope.truncate, c.sinks, c.out_bias, c.window) == (False, True, True, 128)
    told = config(model_type="qwen2", rope_scaling={**qwen, "attention_factor": 1.5})
    assert told.rope.scale == 1.5


def test_two_sizes_of_window_are_refused():
    c = config(model_type="gemma2", sliding_window=64, num_hidden_layers=2)
    with pytest.raises(ConfigError, match="windows of 32 and 64 tokens; one size per model"):
        replace(c, layers=(LayerSpec(window=64), LayerSpec(window=32)))
    with pytest.raises(ConfigError, match="window must be at least 1 token"):
        replace(c, layers=(LayerSpec(window=0),))


_HALF = ["full_attention", "sliding_attention"] * 8
REFUSED = {
    "model type": ({"model_type": "mamba"}, "unsupported model_type 'mamba'.*llama, mistral"),
    "no model type": ({"model_type": ...}, "unsupported model_type None"),
    "llama window": ({"sliding_window": 4096}, "no sliding window.*4096"),
    "window text": ({"model_type": "mistral", "sliding_window": "8"}, "must be an integer"),
    "layer types": ({"layer_types": ["linear_attention"]}, "layer types.*linear_attention"),
    "few types": ({"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
    "no window": (
        {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 16},
        "no sliding_window in use",
    ),
    "half mistral": (
        {"model_type": "mistral", "sliding_window": 8, "layer_types": _HALF},
        "all layers or on none",
    ),
    "experts": ({"model_type": "gpt_oss"}, "mixtures of experts, which are not supported yet"),
    "pattern": ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "pattern"),
    "both ways": (
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        "use_bidirectional_attention",
    ),
    "softcap": ({"model_type": "gemma2", "attn_logit_softcapping": -1.0}, "must be positive"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope"}}, "RoPE type 'longrope'"),
    "yarn ramp": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 2.0}},
        "beta_fast > beta_slow",
    ),
    "odd rope": ({"rope_scaling": [1]}, "must be a JSON object"),
    "linear without factor": ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias"),
    "missing": ({"hidden_size": ...}, "has no hidden_size"),
    "text": ({"hidden_size": "2048"}, "hidden_size.*must be an integer"),
    "bool": ({"num_hidden_layers": True}, "must be an integer"),
    "no layers": ({"num_hidden_layers": 0}, "num_layers must be at least 1"),
    "kv heads": ({"num_key_value_heads": 5}, "5 KV heads do not divide 32"),
    "no heads": ({"num_attention_heads": 0, "head_dim": ...}, "num_heads must be at least 1"),
    "no kv heads": ({"num_key_value_heads": 0}, "num_kv_heads must be at least 1"),
    "odd head": ({"head_dim": 63}, "head_dim must be even"),
    "eps": ({"rms_norm_eps": 0}, "norm_eps"),
    "theta": ({"rope_theta": -1.0}, "theta and factor must be positive"),
    "eos": ({"eos_token_id": "</s>"}, "token id"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_served_is_refused_in_one_line(name):
    changes, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        config(**changes)
    assert "\n" not in str(caught.value)


GGUF_META: dict[str, Any] = {
    "general.architecture": "qwen2",
    "qwen2.block_count": 24,
    "qwen2.context_length": 32768,
    "qwen2.embedding_length": 896,
    "qwen2.feed_forward_length": 4864,
    "qwen2.attention.head_count": 14,
    "qwen2.attention.head_count_kv": 2,
    "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen2.rope.freq_base": 1e6,
    "tokenizer.ggml.eos_token_id": 151645,
}


def gguf_config(**changes: Any):
    tensors = {"token_embd.weight": GGUFTensor("token_embd.weight", (151936, 896), 0, 0)}
    meta = {k: v for k, v in {**GGUF_META, **changes}.items() if v is not ...}
    return model_config_from_gguf(GGUFFile(Path("m.gguf"), meta, tensors))


def test_gguf_qwen2():
    c = gguf_config()
    assert (c.architecture, c.num_layers, c.head_dim, c.qkv_bias) == ("qwen2", 24, 64, True)
    assert (c.vocab_size, c.tie_embeddings, c.eos_ids) == (151936, True, (151645,))


GGUF_REFUSED = {
    "architecture": ({"general.architecture": "gemma3"}, "unsupported architecture 'gemma3'"),
    "experts": ({"qwen2.expert_count": 8}, "mixture-of-experts"),
    "window": ({"qwen2.attention.sliding_window": 4096}, "sliding window"),
    "yarn": ({"qwen2.rope.scaling.type": "yarn"}, "RoPE scaling 'yarn'"),
    "missing": ({"qwen2.block_count": ...}, "qwen2.block_count must be one int, got None"),
    "heads per layer": (
        {"qwen2.attention.head_count_kv": np.array([2, 1])},
        "head_count_kv must be one int",
    ),
    "partial": ({"qwen2.rope.dimension_count": 32}, "RoPE over a part"),
}


@pytest.mark.parametrize("name", sorted(GGUF_REFUSED))
def test_gguf_metadata_that_cannot_be_served_is_refused(name):
    changes, message = GGUF_REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        gguf_config(**changes)
