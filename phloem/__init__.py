"""Phloem: an LLM serving engine whose KV cache is one global, tiered, shared resource."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phloem.core.request import SamplingParams
    from phloem.engine.llm import LLM, Completion

__version__ = "0.1.0"

__all__ = ["LLM", "Completion", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "phloem.engine.llm",
    "Completion": "phloem.engine.llm",
    "SamplingParams": "phloem.core.request",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: the rooms below need none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
