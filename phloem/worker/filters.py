"""min_p, top_k and top_p: what may be drawn, decided by thresholds, so that ties stay together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phloem.core.request import SamplingParams

__all__ = ["filter_logits"]

# The nucleus is nearly always among the first of these; only if not, everything is sorted.
_FIRST = 1024


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
    """The logit of the last token of the smallest set whose probability reaches `top_p`."""
    total = torch.logsumexp(row.double(), dim=-1)
    for count in (min(_FIRST, row.shape[0]), row.shape[0]):
        values = torch.topk(row, count).values
        reached = torch.exp(values.double() - total).cumsum(dim=-1) >= top_p
        if bool(reached[-1]):
            return values[int(reached.int().argmax())]
    return values[-1]
