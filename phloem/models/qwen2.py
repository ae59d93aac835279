"""Qwen2 and Qwen2.5 (dense): biases on q, k and v."""

from __future__ import annotations

from phloem.models.family import Family

__all__ = ["FAMILY"]

FAMILY = Family(architecture="qwen2")
