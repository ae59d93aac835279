"""Llama 1 to 3, SmolLM2, and what else calls itself llama."""

from __future__ import annotations

from phloem.models.family import Family

__all__ = ["FAMILY"]

FAMILY = Family(architecture="llama", gguf_interleaves_qk=True)
