"""Mistral, with a window on all layers or on none. Its GGUF files call themselves llama."""

from __future__ import annotations

from phloem.models.family import Family

__all__ = ["FAMILY"]

FAMILY = Family(architecture="mistral", gguf_interleaves_qk=True)
