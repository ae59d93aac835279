"""Settings as frozen dataclasses by concern; flags and YAML keys are derived from them."""

from __future__ import annotations

from phloem.config.options import (
    CacheOptions,
    Config,
    ModelOptions,
    ParallelOptions,
    RuntimeOptions,
    SchedulerOptions,
    ServerOptions,
    TierOptions,
)

__all__ = [
    "CacheOptions",
    "Config",
    "ModelOptions",
    "ParallelOptions",
    "RuntimeOptions",
    "SchedulerOptions",
    "ServerOptions",
    "TierOptions",
]
