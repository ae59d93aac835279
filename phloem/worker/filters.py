"""min_p, top_k and top_p: what may be drawn, decided by thresholds, so that ties stay together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phloem.core.request import SamplingParams

__all__ = ["filter_logits"]


def filter_logits(scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set what may not be drawn to -inf, in place. `scaled` (R, V): logits over temperature.

    Each row is filtered on its own, since thresholds found in one batch must not depend on another.
    """
    for row, p in zip(scaled, params, strict=True):
        if p.min_p > 0.0:
            # prob >= min_p * best prob, without computing either
            limit = row.amax() + torch.log(row.new_tensor(p.min_p))
            row.masked_fill_(row < limit, -torch.inf)
        if 0 < p.top_k < row.shape[0]:
            limit = torch.topk(row, p.top_k).values[-1]
            row.masked_fill_(row < limit, -torch.inf)
        if p.top_p < 1.0:
            row.masked_fill_(row < _nucleus_limit(row, p.top_p), -torch.inf)


def _nucleus_limit(row: Tensor, top_p: float) -> Tensor:
    """The logit of the last token of the smallest set whose probability reaches `top_p`.

    Only tokens of probability (1 - top_p) / V and more are sorted: all others together have less
    than 1 - top_p, so the set is complete before the first of them.
    """
    total = torch.logsumexp(row.double(), dim=-1)
    floor = total + math.log((1.0 - top_p) / row.shape[0])
    values = torch.sort(row[row >= floor], descending=True).values
    reached = torch.exp(values.double() - total).cumsum(dim=-1) >= top_p
    # Rounding may leave the sum of all a hair below top_p; then the last one is the limit.
    return values[int(reached.int().argmax())] if bool(reached[-1]) else values[-1]
