"""Phloem: an LLM serving engine whose KV cache is one global, tiered, shared resource."""

from __future__ import annotations

__version__ = "0.1.0"
