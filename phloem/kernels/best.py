"""The greatest logit of each row, by what PyTorch has."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["best_tokens"]


def best_tokens(logits: Tensor) -> list[int]:
    """The first of the greatest of each row of logits (R, vocab); -1 if one is not finite."""
    finite = torch.isfinite(logits.sum(dim=-1))
    best: list[int] = torch.where(finite, logits.argmax(dim=-1), -1).tolist()
    return best
