"""Attention over pages: write the new K and V, then read everything back from the pages."""

from __future__ import annotations

from phloem.attention.backend import AttentionBackend
from phloem.attention.batch import RaggedBatch, RowSpan
from phloem.attention.gather import GatherAttention
from phloem.attention.layered import LayeredAttention
from phloem.attention.mla import MLAAttention
from phloem.attention.mla_reference import MLAReferenceAttention
from phloem.attention.reference import ReferenceAttention

__all__ = [
    "AttentionBackend",
    "GatherAttention",
    "LayeredAttention",
    "MLAAttention",
    "MLAReferenceAttention",
    "RaggedBatch",
    "ReferenceAttention",
    "RowSpan",
]
