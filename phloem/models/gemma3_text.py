"""Gemma 3, text: as Gemma 2, with q and k normalised per head."""

from __future__ import annotations

from phloem.models.family import Family
from phloem.models.gemma2 import GEMMA_NAMES

__all__ = ["FAMILY"]

FAMILY = Family(architecture="gemma3_text", hf=GEMMA_NAMES, hf_norm_offset=1.0)
