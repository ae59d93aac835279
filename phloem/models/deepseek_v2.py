"""DeepSeek-V2: latent attention. Its experts are not there yet: layers with a dense MLP only."""

from __future__ import annotations

from phloem.models.family import Family

__all__ = ["FAMILY"]

FAMILY = Family(architecture="deepseek_v2")
