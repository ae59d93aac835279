"""How much memory a step may need beside weights and pages."""

from __future__ import annotations

from collections.abc import Sequence

from phloem.attention.gather_plan import CONTEXT_BLOCK_TOKENS, MAX_BAND
from phloem.attention.mla import EXPANDED_BYTES
from phloem.attention.remote_pages import HALVES, staged_pages
from phloem.config.mla import MLAConfig
from phloem.config.model import ModelConfig
from phloem.kv.spec import KVDtype, KVSpec
from phloem.models import MLP_CHUNK_TOKENS

__all__ = ["MAX_LOGITS_BYTES", "activation_bytes", "logits_rows_per_pass", "staging_bytes"]

# Logits of sampled rows are computed and consumed in passes of at most this size.
MAX_LOGITS_BYTES = 64 << 20
_FP32 = 4


def logits_rows_per_pass(vocab_size: int) -> int:
    """Rows whose logits exist at once (at least 1)."""
    return max(1, MAX_LOGITS_BYTES // (vocab_size * _FP32))


def staging_bytes(specs: Sequence[KVSpec], num_pages: Sequence[int], *, ranks: int) -> int:
    """An upper bound of what copies of travelling pages take on one of `ranks`, beside its pools.

    `num_pages`: of each rank, by component. At the worst a step reads all pages of all others: one
    layer of them lies in each half of the staging buffer, which has some room to spare; and one
    layer of this rank's own is on its way to each of them, while the next one is packed. Layers
    with a window stage their own pages as well.
    """
    total = 0
    for spec, pages in zip(specs, num_pages, strict=True):
        if not spec.num_layers:
            continue
        layer_bytes = spec.page_bytes // spec.num_layers
        staged = (ranks if spec.retention is not None else ranks - 1) * pages
        sent = (ranks - 1) * pages
        total += layer_bytes * (HALVES * staged_pages(staged) + 2 * sent)
    return total


def activation_bytes(
    config: ModelConfig,
    max_prefill_tokens: int,
    *,
    dtype: KVDtype,
    max_running: int,
    tp: int = 1,
) -> int:
    """An upper bound of a step's peak, for a chunk of `max_prefill_tokens` alone or in parts.

    `config`: what this rank computes of a model, in a row of `tp` ranks; a sum over the row holds
    every rank's summand.

    At its widest a layer holds, per token of the chunk: the residual and a normed copy, q, k and v,
    their rotated fp32 temporaries, a gather of K and V (heads expanded by views), two partial
    outputs of attention and their fp32 sums while merging. The MLP adds its intermediates for
    `MLP_CHUNK_TOKENS`; layers with a window add the K and V of one window and the mask of a band of
    queries, norms behind attention and MLP a normed copy, latents a run of expanded keys; sampling
    adds ten fp32 copies of the logits of the rows of one pass. All of it is linear in the chunk: no
    matrix of tokens by tokens exists, and no logits that nobody asked for.
    """
    width = dtype.part_bytes(1)
    if config.mla is not None:
        per_token = _latent_bytes(config, config.mla, width)
    else:
        per_token = _heads_bytes(config, width)
    if tp > 1:
        per_token += ((tp - 1) * width + _FP32) * config.hidden_size
    if config.post_norms:
        per_token += (width + 2 * _FP32) * config.hidden_size
    window = min(config.window or 0, config.max_position)
    band = window * width * 2 * config.kv_size + MAX_BAND * (window + MAX_BAND) * (width + 2)
    mlp = min(max_prefill_tokens, MLP_CHUNK_TOKENS) * config.intermediate_size * (3 * 2 * _FP32)
    rows = min(max_running, logits_rows_per_pass(config.vocab_size))
    steady = mlp + (band if window else 0)
    if config.mla is not None:
        steady += _expanded_bytes(config, config.mla, width)
    return max_prefill_tokens * per_token + steady + 10 * rows * config.vocab_size * _FP32


def _heads_bytes(config: ModelConfig, width: int) -> int:
    """Of a token of the chunk, at the widest place of a layer."""
    qkv = config.q_size + 2 * config.kv_size
    per_token = width * (2 * config.hidden_size + 2 * qkv + 2 * config.kv_size + 3 * config.q_size)
    per_token += _FP32 * (2 * (config.q_size + config.kv_size) + 4 * config.q_size)
    return per_token + _FP32 * (config.hidden_size + qkv)  # where bf16 is multiplied in fp32


def _latent_bytes(config: ModelConfig, mla: MLAConfig, width: int) -> int:
    """The same with latent attention: queries, once more where they are absorbed, and the results
    of two parts while they are merged."""
    absorbed, out = config.num_heads * mla.row_dim, config.out_size
    first = mla.row_dim + (mla.q_rank or 0)
    per_token = width * (2 * config.hidden_size + 2 * first + 2 * config.q_size + 2 * absorbed)
    per_token += width * (2 * mla.row_dim + 4 * out)
    per_token += _FP32 * (2 * config.q_size + 2 * absorbed + 4 * out)
    return per_token + _FP32 * (config.hidden_size + first)


def _expanded_bytes(config: ModelConfig, mla: MLAConfig, width: int) -> int:
    """K and V of all heads of a run of keys, made of their latents."""
    widest = max(config.head_dim, mla.v_dim)
    token_bytes = config.num_heads * (mla.up_dim + 2 * widest) * width
    return min(EXPANDED_BYTES, min(CONTEXT_BLOCK_TOKENS, config.max_position) * token_bytes)
