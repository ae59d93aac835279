"""The engine loop: plan, submit, collect, apply; the worker is injected."""

from __future__ import annotations

from phloem.loop.engine_loop import EngineLoop

__all__ = ["EngineLoop"]
