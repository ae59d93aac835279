"""Joins both wings: processes, IPC, tokenizer and detokenizer, the asynchronous engine, `LLM`."""

from __future__ import annotations

from phloem.engine.async_engine import AsyncEngine
from phloem.engine.facts import EngineFacts, startup_rows
from phloem.engine.llm import LLM, Completion
from phloem.engine.models import load_tokenizer, resolve_model

__all__ = [
    "LLM",
    "AsyncEngine",
    "Completion",
    "EngineFacts",
    "load_tokenizer",
    "resolve_model",
    "startup_rows",
]
