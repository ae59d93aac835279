"""Tiers below the device: write and prefetch policies, cost model, and the one who submits."""

from __future__ import annotations

from phloem.tiers.config import PREFETCH_POLICIES, WRITE_POLICIES, TierConfig
from phloem.tiers.controller import LoadEnd, StorageKeys, TierController
from phloem.tiers.cost import CostModel, Forced
from phloem.tiers.decisions import Choice, Decision, Decisions, StorageWay
from phloem.tiers.windows import RestorableLengths

__all__ = [
    "PREFETCH_POLICIES",
    "WRITE_POLICIES",
    "Choice",
    "CostModel",
    "Decision",
    "Decisions",
    "Forced",
    "LoadEnd",
    "RestorableLengths",
    "StorageKeys",
    "StorageWay",
    "TierConfig",
    "TierController",
]
