"""The simulator: the real loop, scheduler and cache with a fake worker and a virtual clock."""

from __future__ import annotations

from phloem.sim.cost import CostModel, CostWorker
from phloem.sim.fake_worker import FakeWorker
from phloem.sim.models import NextToken, cold, hash_model, scripted_model
from phloem.sim.replay import (
    Ranks,
    ReplayReport,
    ReplayTarget,
    pages_of,
    replay,
    simulated_target,
)
from phloem.sim.traces import TraceError, TraceRequest, read_trace, trace_tokens
from phloem.sim.transfers import SimStorage, SimTransfers, TransferCosts
from phloem.sim.window import FakeWindow, PageFault

__all__ = [
    "CostModel",
    "CostWorker",
    "FakeWindow",
    "FakeWorker",
    "NextToken",
    "PageFault",
    "Ranks",
    "ReplayReport",
    "ReplayTarget",
    "SimStorage",
    "SimTransfers",
    "TraceError",
    "TraceRequest",
    "TransferCosts",
    "cold",
    "hash_model",
    "pages_of",
    "read_trace",
    "replay",
    "scripted_model",
    "simulated_target",
    "trace_tokens",
]
