"""Fast ops from PyTorch's own kernels, for CPU and CUDA."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from phloem.kernels.buffer import KVBuffer
from phloem.kernels.table import Scoring

__all__ = ["TorchOps", "cpu_multiplies_bf16"]

# Without bf16 instructions oneDNN's bf16 matmul runs at 1/8 of fp32's speed (measured, AVX2: 18
# against 146 GFLOP/s at 512 rows), but a matrix-vector product reads half the bytes.
FEW_ROWS = 1
# Rows of weights widened at a time: 4 MiB of fp32 stays in the last-level cache.
WIDEN_BYTES = 4 << 20
# What scaled_dot_product_attention calls on a CPU; unlike that, it returns the LSE. It reads K and
# V through their strides, so heads that share them may be views with stride 0.
_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
# Scores held at once where no fused kernel returns the LSE.
SCORES_BYTES = 64 << 20


@functools.cache
def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has bf16 matrix instructions (AVX512-BF16, AMX, Arm BF16)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    flags = next(
        (line for line in text.splitlines() if line.startswith(("flags", "Features"))), ""
    ).split()
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))


class TorchOps:
    """Stateless. Results equal `ReferenceOps` within the rounding of x's dtype."""

    name = "torch"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if (
            x.dtype is torch.bfloat16
            and x.device.type == "cpu"
            and x.shape[0] > FEW_ROWS
            and not cpu_multiplies_bf16()
        ):
            return _linear_widened(x, weight, bias)
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype is not x.dtype:
            return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        cos, sin = cos[:, None, :], sin[:, None, :]
        first, second = x[..., :half], x[..., half:]
        # Angles are fp32, so bf16 halves are promoted and rounded once, on the way back.
        turned = torch.addcmul(first * cos, second, sin, value=-1)
        second_turned = torch.addcmul(second * cos, first, sin)
        first.copy_(turned)
        second.copy_(second_turned)
        return x

    def heads_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        widen = x.dtype is torch.bfloat16 and x.device.type == "cpu" and not cpu_multiplies_bf16()
        if widen:
            out = torch.bmm(x.float().transpose(0, 1), weight.float().transpose(1, 2))
        else:
            out = torch.bmm(x.transpose(0, 1), weight.transpose(1, 2))
        return out.transpose(0, 1).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def write_kv(self, buffer: KVBuffer, layer: int, k: Tensor, v: Tensor, index: Tensor) -> None:
        if not len(index):
            return  # nothing of what was computed is written here
        width = buffer.heads_per_group * buffer.row_items
        for kv, value in enumerate((k, v)[: buffer.num_sides]):
            stored = buffer.encode(value).reshape(-1, width)
            buffer.token_rows(layer, kv).index_copy_(0, index, stored)

    def gather_kv(self, buffer: KVBuffer, layer: int, index: Tensor) -> Tensor:
        rows = buffer.object_rows(layer).index_select(0, index.reshape(-1))
        rows = buffer.decode(rows.view(-1, buffer.row_items))
        heads, dim, sides = buffer.heads_per_group, buffer.head_dim, buffer.num_sides
        if heads == 1:
            return rows.view(sides, buffer.num_kv_heads, -1, dim)
        by_token = rows.view(sides, buffer.num_head_groups, -1, heads, dim)
        return by_token.transpose(2, 3).contiguous().view(sides, buffer.num_kv_heads, -1, dim)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scoring: Scoring,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if q.device.type == "cpu" and scoring.softcap is None:
            dim, v_dim = q.shape[-1], v.shape[-1]
            if v_dim != dim:  # the kernel wants one size; zeros change nothing
                q, k, v = (F.pad(x, (0, max(dim, v_dim) - x.shape[-1])) for x in (q, k, v))
            out, lse = _flash_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scoring.scale)
            return out if out.shape[-1] == v_dim else out[..., :v_dim], lse
        return _attend_in_blocks(q, k, v, scoring, causal=causal, mask=mask)


def _linear_widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """bf16 in and out, multiplied in fp32, a cache-sized block of weight rows at a time."""
    x32 = x.float()
    step = max(1, WIDEN_BYTES // (4 * weight.shape[1]))
    if weight.shape[0] <= step:
        return F.linear(x32, weight.float(), None if bias is None else bias.float()).to(x.dtype)
    out = x.new_empty((x.shape[0], weight.shape[0]))
    for low in range(0, weight.shape[0], step):
        part = weight[low : low + step].float()
        shift = None if bias is None else bias[low : low + step].float()
        out[:, low : low + step] = F.linear(x32, part, shift)
    return out


def _attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, *, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Exact attention with an LSE out of plain matrix products, a block of queries at a time."""
    batch, heads, count, _ = q.shape
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((batch, heads, count), dtype=torch.float32)
    step = max(1, SCORES_BYTES // (4 * batch * heads * k.shape[2]))
    keys = torch.arange(k.shape[2], device=q.device)
    for low in range(0, count, step):
        high = min(low + step, count)
        scores = (q[:, :, low:high] @ k.transpose(-1, -2)).float().mul_(scoring.scale)
        if scoring.softcap is not None:
            scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
        if causal:
            scores.masked_fill_(keys > keys[low:high, None], -math.inf)
        if mask is not None:
            scores += mask if mask.shape[-2] == 1 else mask[..., low:high, :]
        lse[:, :, low:high] = torch.logsumexp(scores, dim=-1)
        out[:, :, low:high] = torch.softmax(scores, dim=-1).to(v.dtype) @ v
    return out, lse
