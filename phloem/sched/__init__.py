"""Scheduling: admission, policies, prefill packing, decode set, retraction, page tables."""

from __future__ import annotations

from phloem.sched.config import SchedulerConfig
from phloem.sched.policies import policy_names
from phloem.sched.queue import STARTS_WITHIN_PASSES
from phloem.sched.scheduler import Scheduler

__all__ = ["STARTS_WITHIN_PASSES", "Scheduler", "SchedulerConfig", "policy_names"]
