"""Highest response ratio next: (wait + service) / service.

Service is the number of tokens to compute, and waiting is measured by the tokens that all steps
computed meanwhile: both in one unit, and no clock. Short requests go first, yet every ratio grows
without bound while a request waits.
"""

from __future__ import annotations

from collections.abc import Hashable

from phloem.sched.policies import Policy, PolicyView, Rank
from phloem.sched.state import RequestState

__all__ = ["POLICY"]


def rank(request: RequestState, view: PolicyView) -> Rank:
    service = max(1, request.num_uncached)
    wait = view.planned_tokens - request.queued_at_tokens
    return (-request.priority, -(wait + service) / service)


def epoch(view: PolicyView) -> Hashable:
    return view.planned_tokens


POLICY = Policy(rank=rank, epoch=epoch)
