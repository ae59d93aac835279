"""Exact merge of partial attention results by their log-sum-exp (natural log)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_sinks", "merge_partials"]


def merge_partials(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys.

    Outputs are (..., D), LSEs (...,) fp32. An empty set has LSE -inf and weight exactly 0, whatever
    its output holds; both empty gives 0 and -inf.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    base = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    weight_a = torch.exp(lse_a - base)[..., None]
    weight_b = torch.exp(lse_b - base)[..., None]
    part_a = torch.where(weight_a > 0, out_a.float() * weight_a, 0.0)
    part_b = torch.where(weight_b > 0, out_b.float() * weight_b, 0.0)
    return (part_a + part_b).to(out_a.dtype), lse


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention after one score more, of no token, has joined each softmax.

    `out` (..., D) and its LSE (...); `sinks` are broadcast over the LSE. All keys must be in.
    """
    kept = torch.sigmoid(lse - sinks.float())  # exp(lse) / (exp(lse) + exp(sink))
    return (out.float() * kept[..., None]).to(out.dtype)
