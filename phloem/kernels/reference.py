"""Slow, obvious versions of every op, in fp32: the oracle of the fast ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from phloem.kernels.buffer import KVBuffer
from phloem.kernels.table import Scoring

__all__ = ["ReferenceOps", "paged_attention"]


class ReferenceOps:
    """The definition of each op."""

    name = "reference"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = x.float() @ weight.float().T
        if bias is not None:
            out = out + bias.float()
        return out.to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
        return (x32 * scale * weight.float()).to(x.dtype)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        first, second = x.float()[..., :half], x.float()[..., half:]
        cos, sin = cos[:, None, :], sin[:, None, :]
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.to(x.dtype)

    def heads_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("nhi,hoi->nho", x.float(), weight.float()).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return (0.5 * gate * (1 + torch.tanh(inner)) * up).to(gate_up.dtype)

    def write_kv(self, buffer: KVBuffer, layer: int, k: Tensor, v: Tensor, index: Tensor) -> None:
        if not len(index):
            return  # nothing of what was computed is written here
        width = buffer.heads_per_group * buffer.row_items
        for kv, value in enumerate((k, v)[: buffer.num_sides]):
            rows, sources = buffer.token_rows(layer, kv), buffer.encode(value).reshape(-1, width)
            for row, source in zip(index.tolist(), sources, strict=True):
                rows[row] = source

    def gather_kv(self, buffer: KVBuffer, layer: int, index: Tensor) -> Tensor:
        rows = buffer.object_rows(layer)[index.reshape(-1)]
        sides, groups = buffer.num_sides, buffer.num_head_groups
        rows = buffer.decode(rows.reshape(-1, buffer.row_items))
        by_token = rows.reshape(sides, groups, -1, buffer.heads_per_group, buffer.head_dim)
        by_head = by_token.transpose(2, 3).contiguous()  # (J, G, h, S, D)
        return by_head.view(sides, buffer.num_kv_heads, -1, buffer.head_dim)

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
        scores = _scores(q.float() @ k.float().transpose(-1, -2), scoring)
        if causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        if mask is not None:
            scores = scores + mask.float()
        out = torch.softmax(scores, dim=-1) @ v.float()
        return out.to(q.dtype), torch.logsumexp(scores, dim=-1)


def _scores(products: Tensor, scoring: Scoring) -> Tensor:
    scores = products * scoring.scale
    if scoring.softcap is None:
        return scores
    return scoring.softcap * torch.tanh(scores / scoring.softcap)


def _nothing_hidden(position: int) -> int:
    del position
    return 0


def paged_attention(
    q: Tensor,
    buffer: KVBuffer,
    layer: int,
    slots: Mapping[int, int] | Sequence[int],
    start: int,
    *,
    scoring: Scoring | None = None,
    earliest: Callable[[int], int] = _nothing_hidden,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One row, token by token: queries q (L, H, D) at positions start ... start + L - 1.

    A query at p reads the K and V of positions earliest(p) ... p, from the pages of `slots` (page
    number -> slot). `scoring` None: products over the root of D. `sinks` (H,): a score more in each
    head's denominator. Returns the output (L, H, D) and its LSE without the sinks (L, H), natural
    log.
    """
    scoring = scoring or Scoring(q.shape[-1] ** -0.5)
    count, heads, dim = q.shape
    size = buffer.page_size
    pages = buffer.layer(layer)  # (P + 1, G, 2, T, h, items)
    rep = heads // buffer.num_kv_heads
    out, lse = torch.empty_like(q), q.new_empty((count, heads), dtype=torch.float32)
    for i in range(count):
        at = start + i
        positions = range(earliest(at), at + 1)
        seen = [pages[slots[pos // size], :, :, pos % size] for pos in positions]
        kv = buffer.decode(torch.stack(seen)).float()  # (S, G, 2, h, D)
        k = kv[:, :, 0].reshape(len(seen), buffer.num_kv_heads, dim)
        v = kv[:, :, 1].reshape(len(seen), buffer.num_kv_heads, dim)
        for head in range(heads):
            scores = _scores(k[:, head // rep] @ q[i, head].float(), scoring)
            lse[i, head] = torch.logsumexp(scores, dim=0)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].float()))
            weights = torch.softmax(scores, dim=0)[: len(seen)]
            out[i, head] = (weights @ v[:, head // rep]).to(q.dtype)
    return out, lse
