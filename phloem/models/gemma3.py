"""The language model of a Gemma 3 checkpoint that also sees images; those parts are not read."""

from __future__ import annotations

import dataclasses

from phloem.models.family import Family, WeightNames
from phloem.models.gemma2 import GEMMA_NAMES

__all__ = ["FAMILY"]

_NAMES = {
    name: f"language_model.{value}" for name, value in dataclasses.asdict(GEMMA_NAMES).items()
}
FAMILY = Family(architecture="gemma3", hf=WeightNames(**_NAMES), hf_norm_offset=1.0)
