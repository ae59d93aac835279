"""Qwen3 (dense): q and k are normalised per head; head_dim is free of hidden / heads."""

from __future__ import annotations

from phloem.models.family import Family

__all__ = ["FAMILY"]

FAMILY = Family(architecture="qwen3")
