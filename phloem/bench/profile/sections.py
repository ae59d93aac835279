"""What a native layer consists of: its sections, one call each, on the shapes of a decode step.

A layer is one native call, so its parts cannot be seen from outside. Here the same operations run
one by one on weights and pages of the model's sizes (random, more than the caches hold); beside
them stands the whole layer as the step had it, so that one sees how far the sum is from it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phloem.config.model import ModelConfig
from phloem.kernels import KVBuffer
from phloem.kernels.native import NativeBatch, NativeKernels, kv_layer
from phloem.kernels.native_pack import pack, pack_gate_up

__all__ = ["Section", "layer_sections"]

_PAGE = 16
_ROUNDS = 7
_LAYERS = 8  # copies of all weights and pages that a round passes through


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of a layer, in milliseconds per step (all layers together)."""

    name: str
    ms: float


@torch.inference_mode()
def layer_sections(
    config: ModelConfig, *, batch: int, context: int, dtype_name: str, threads: int
) -> list[Section]:
    """Sections of a step of `batch` rows behind `context` tokens each."""
    kernels = NativeKernels(threads=threads)
    try:
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype_name]
        buffer, rows = _pages(config, batch, context, dtype)  # layers only borrow the pages
        calls = _calls(kernels, config, dtype, buffer, rows)
        return [
            Section(name=name, ms=_median_ms(call) / _LAYERS * config.num_layers)
            for name, call in calls.items()
        ]
    finally:
        kernels.close()


def _calls(
    kernels: NativeKernels,
    config: ModelConfig,
    dtype: torch.dtype,
    buffer: KVBuffer,
    rows: NativeBatch,
) -> dict[str, Callable[[], object]]:
    batch, positions = len(rows.tables), int(rows.positions.max()) + 1
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads
    width, dim = (heads + 2 * config.num_kv_heads) * config.head_dim, config.head_dim
    x, mixed = torch.randn(batch, hidden), torch.randn(batch, heads * dim)
    deep, norm = torch.randn(batch, inner), torch.ones(hidden)
    q = torch.randn(batch, heads, dim)
    k, v = torch.randn(2, batch, config.num_kv_heads, dim)
    layers = [kv_layer(buffer, i) for i in range(_LAYERS)]
    angles = torch.ones(positions, dim // 2), torch.zeros(positions, dim // 2)

    def write_all() -> None:
        for kv in layers:
            kernels.rope_kv_write(q, (k, v), kv, rows, angles=angles)

    def weights(n: int, k_: int) -> list[Tensor]:
        return [torch.randn(n, k_).to(dtype) for _ in range(_LAYERS)]

    qkv, out, down = (
        [pack(w) for w in weights(*shape)]
        for shape in ((width, hidden), (hidden, heads * dim), (hidden, inner))
    )
    gate_up = [
        pack_gate_up(gate, up)
        for gate, up in zip(weights(inner, hidden), weights(inner, hidden), strict=True)
    ]
    return {
        "norms": lambda: [kernels.rms_norm(x, norm, 1e-5) for _ in range(2 * _LAYERS)],
        "qkv": lambda: [kernels.linear(x, w) for w in qkv],
        "rope, KV write": write_all,
        "attention": lambda: [kernels.attention(q, kv, rows) for kv in layers],
        "attention out": lambda: [kernels.linear(mixed, w) for w in out],
        "gate, up, silu": lambda: [kernels.linear(x, w) for w in gate_up],
        "down": lambda: [kernels.linear(deep, w) for w in down],
    }


def _pages(
    config: ModelConfig, batch: int, context: int, dtype: torch.dtype
) -> tuple[KVBuffer, NativeBatch]:
    per_row = context // _PAGE + 1
    shape = (batch * per_row + 1, config.num_kv_heads, _LAYERS, 2, _PAGE, 1, config.head_dim)
    tables = np.random.default_rng(0).permutation(batch * per_row).reshape(batch, per_row)
    rows = NativeBatch(
        np.arange(batch + 1, dtype=np.int32), np.full(batch, context, np.int32), tables
    )
    return KVBuffer(torch.randn(shape).to(dtype)), rows


def _median_ms(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1000
