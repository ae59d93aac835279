"""Native CPU kernels against PyTorch's, one operation at a time, interleaved.

Shapes are SmolLM2-135M's, bf16. For each NAME: NAME_us (native), NAME_torch_us, and NAME_ratio,
the median of torch / native over pairs. Weights and pages pass through more memory than the caches
hold, as in a real step. PyTorch's attention gets K and V gathered and contiguous, for free.

    read_GBps                    what the threads read together, summing 256 MiB
    gemm_m1 ... gemm_m512        gate and up, (m, 576) x (576, 3072)
    gemm_m1_bandwidth_fraction   bytes of weights per second at m = 1, over read_GBps
    gemm_int8_m1, gemm_q4_0_m1   the same product with quantised weights (torch: bf16)
    layer_ISA_m1 ... m512        the four products of a layer, by every instruction set that `auto`
                                 trusts here, against what `--kernels torch` does
    attention_decode_b8          8 rows of 512 tokens, 9 heads on 3
    attention_prefill_1024       one chunk of 1,024 tokens
    rms_norm_512, silu_mul_512   512 rows
    top_k_50                     of 49,152 logits
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from phloem.kernels import KVBuffer, make_ops
from phloem.kernels.native import NativeBatch, NativeKernels, PackedWeight, kv_layer
from phloem.kernels.native_abi import CpuIsa, WeightFormat
from phloem.kernels.native_pack import pack, pack_blocks
from phloem.kernels.native_proof import trusted_isas
from phloem.kernels.quantised import BlockMatrix

__all__ = ["run"]

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, PAGE = 576, 1536, 9, 3, 64, 49_152, 16
COPIES = 16  # of a weight: together more than a last-level cache
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
LAYER = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
LAYER_ROWS = (1, 8, 32, 512)
CONTEXT, BATCH, CHUNK = 512, 8, 1024

Call = Callable[[], object]
Results = list[dict[str, Any]]


@torch.inference_mode()
def run(quick: bool = False) -> dict[str, Any]:
    """All figures: medians, with the raw samples beside them."""
    rounds = 3 if quick else 9
    torch.manual_seed(0)
    kernels = NativeKernels()
    before = torch.get_num_threads()
    torch.set_num_threads(kernels.num_threads)
    try:
        bandwidth = _read_bandwidth(rounds)
        results = [_figure("read_GBps", bandwidth, "GB/s")]
        results += _gemms(kernels, rounds, statistics.median(bandwidth))
        results += _layers(rounds)
        results += _attention(kernels, rounds)
        results += _pointwise(kernels, rounds)
    finally:
        torch.set_num_threads(before)
        kernels.close()
    return {"bench": "kernels", "results": results}


def _seconds(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _figure(name: str, samples: list[float], unit: str) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(statistics.median(samples), 3),
        "unit": unit,
        "samples": [round(sample, 3) for sample in samples],
    }


def _pairs(name: str, native: Call, other: Call, rounds: int, calls: int = 1) -> Results:
    """Native, torch, native, torch ...; each sample is `calls` calls, reported per call."""
    native()
    other()
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(_seconds(native) / calls * 1e6)
        theirs.append(_seconds(other) / calls * 1e6)
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    return [
        _figure(f"{name}_us", ours, "us"),
        _figure(f"{name}_torch_us", theirs, "us"),
        {
            "name": f"{name}_ratio",
            "value": round(ratio, 3),
            "unit": "ratio",
            "samples": {"torch": theirs, "native": ours},
        },
    ]


def _read_bandwidth(rounds: int) -> list[float]:
    data = torch.ones(64 << 20)
    data.sum()
    return [data.nbytes / 1e9 / _seconds(data.sum) for _ in range(rounds)]


def _gemms(kernels: NativeKernels, rounds: int, bandwidth: float) -> Results:
    plain = [torch.randn(2 * INNER, HIDDEN).bfloat16() for _ in range(COPIES)]
    packed = [pack(w) for w in plain]
    results: Results = []
    for rows in (1, 8, 32, 512):
        few = COPIES if rows <= 32 else 1
        results += _product(f"gemm_m{rows}", kernels, packed[:few], plain[:few], rows, rounds)
    weight_bytes = packed[0].num_bytes
    fractions = [weight_bytes / us / 1e3 / bandwidth for us in results[0]["samples"]]
    results.append(_figure("gemm_m1_bandwidth_fraction", fractions, "fraction"))
    int8 = [pack(w, format=WeightFormat.Q8_0) for w in plain]
    results += _product("gemm_int8_m1", kernels, int8, plain, 1, rounds)
    shape = (2 * INNER, HIDDEN // 32 * 18)
    blocks = [
        pack_blocks(BlockMatrix(torch.randint(0, 60, shape, dtype=torch.uint8), WeightFormat.Q4_0))
        for _ in range(COPIES)
    ]
    return results + _product("gemm_q4_0_m1", kernels, blocks, plain, 1, rounds)


def _product(
    name: str,
    kernels: NativeKernels,
    ours: list[PackedWeight],
    theirs: list[torch.Tensor],
    rows: int,
    rounds: int,
) -> Results:
    x = torch.randn(rows, HIDDEN).bfloat16()
    return _pairs(
        name,
        lambda: [kernels.linear(x, w) for w in ours],
        lambda: [F.linear(x, w) for w in theirs],
        rounds,
        len(ours),
    )


def _layers(rounds: int) -> Results:
    """The products of layers, natively on each instruction set, and by PyTorch's."""
    plain = [torch.randn(shape).bfloat16() for _ in range(COPIES // 4) for shape in LAYER]
    packed = [pack(w) for w in plain]
    results: Results = []
    for isa in trusted_isas():
        if isa is CpuIsa.PLAIN:
            continue
        kernels = NativeKernels(isa=isa)
        for rows in LAYER_ROWS:
            count = len(LAYER) if rows == LAYER_ROWS[-1] else len(plain)
            weights = (packed[:count], plain[:count])
            results += _layer(f"layer_{isa.value}_m{rows}", kernels, weights, rows, rounds)
        kernels.close()
    return results


def _layer(
    name: str,
    kernels: NativeKernels,
    weights: tuple[list[PackedWeight], list[torch.Tensor]],
    rows: int,
    rounds: int,
) -> Results:
    inputs = {k: torch.randn(rows, k).bfloat16() for k in (HIDDEN, INNER)}
    ops, (ours, theirs) = make_ops("torch"), weights
    return _pairs(
        name,
        lambda: [kernels.linear(inputs[w.k], w) for w in ours],
        lambda: [ops.linear(inputs[w.shape[1]], w, None) for w in theirs],
        rounds,
        len(ours) // len(LAYER),
    )


def _attention(kernels: NativeKernels, rounds: int) -> Results:
    pages = BATCH * (CONTEXT // PAGE)
    buffer = KVBuffer(torch.randn(pages + 1, KV_HEADS, 1, 2, PAGE, 1, HEAD_DIM).bfloat16())
    kv = kv_layer(buffer, 0)
    tables = np.random.default_rng(0).permutation(pages).reshape(BATCH, -1)
    decode = NativeBatch(
        np.arange(BATCH + 1, dtype=np.int32), np.full(BATCH, CONTEXT - 1, np.int32), tables
    )
    chunk = NativeBatch(
        np.array([0, CHUNK], np.int32), np.arange(CHUNK, dtype=np.int32), tables.reshape(1, -1)
    )
    q = torch.randn(BATCH, HEADS, HEAD_DIM).bfloat16()
    k, v = torch.randn(2, BATCH, KV_HEADS, CONTEXT, HEAD_DIM).bfloat16()
    results = _pairs(
        "attention_decode_b8",
        lambda: kernels.attention(q, kv, decode),
        lambda: F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True),
        rounds,
    )
    long_q = torch.randn(CHUNK, HEADS, HEAD_DIM).bfloat16()
    long_k, long_v = torch.randn(2, 1, HEADS, CHUNK, HEAD_DIM).bfloat16()
    by_head = long_q.transpose(0, 1)[None].contiguous()
    return results + _pairs(
        "attention_prefill_1024",
        lambda: kernels.attention(long_q, kv, chunk),
        lambda: F.scaled_dot_product_attention(by_head, long_k, long_v, is_causal=True),
        rounds,
    )


def _pointwise(kernels: NativeKernels, rounds: int) -> Results:
    x, w = torch.randn(512, HIDDEN).bfloat16(), torch.ones(HIDDEN).bfloat16()
    gate_up, logits = torch.randn(512, 2 * INNER).bfloat16(), torch.randn(VOCAB)
    norm = w.float()
    results = _pairs(
        "rms_norm_512",
        lambda: kernels.rms_norm(x, norm, 1e-5),
        lambda: F.rms_norm(x, (HIDDEN,), w, 1e-5),
        rounds,
    )
    results += _pairs(
        "silu_mul_512",
        lambda: kernels.silu_mul(gate_up),
        lambda: F.silu(gate_up[:, :INNER]) * gate_up[:, INNER:],
        rounds,
    )
    return results + _pairs(
        "top_k_50",
        lambda: kernels.top_k(logits, 50),
        lambda: (torch.topk(logits, 50), torch.logsumexp(logits, 0)),
        rounds,
    )
