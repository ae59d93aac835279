"""What this machine could do at best: read bandwidth and matrix products, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from phloem.config.model import ModelConfig

__all__ = ["Ceiling", "decode_bytes", "measure_ceiling", "prefill_flops"]

_READ_BYTES = 512 << 20
_MATMUL = 1536
_REPEATS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """Best of several repeats: a ceiling is what was reached once."""

    read_bytes_s: float
    flops: float


def measure_ceiling(threads: int) -> Ceiling:
    """Sum a large array, and multiply fp32 matrices, on `threads` threads."""
    import torch  # only here: everything else of a comparison runs in other processes

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        data = torch.ones(_READ_BYTES // 4)
        read = _best(lambda: data.sum())
        a, b = torch.ones(_MATMUL, _MATMUL), torch.ones(_MATMUL, _MATMUL)
        product = _best(lambda: torch.mm(a, b))
    finally:
        torch.set_num_threads(before)
    return Ceiling(read_bytes_s=_READ_BYTES / read, flops=2 * _MATMUL**3 / product)


def prefill_flops(config: ModelConfig, length: int) -> float:
    """Multiplications and additions a token, on average over a cold prompt of `length`."""
    attention = 2 * 2 * config.num_heads * config.head_dim * (length + 1) / 2
    return 2 * _layer_weights(config) + config.num_layers * attention


def decode_bytes(config: ModelConfig, context: int, *, bytes_each: int = 2) -> float:
    """Bytes that one row's step must read: all weights with the output head, and its KV."""
    head = config.vocab_size * config.hidden_size
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * context
    return bytes_each * (_layer_weights(config) + head + kv)


def _layer_weights(config: ModelConfig) -> int:
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    out = config.num_heads * config.head_dim
    per_layer = config.hidden_size * (qkv + out + 3 * config.intermediate_size)
    return config.num_layers * per_layer


def _best(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
