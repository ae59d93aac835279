"""First come, first served."""

from __future__ import annotations

from phloem.sched.policies import Policy, PolicyView, Rank
from phloem.sched.state import RequestState

__all__ = ["POLICY"]


def rank(request: RequestState, view: PolicyView) -> Rank:  # noqa: ARG001
    return (-request.priority,)


POLICY = Policy(rank=rank, uses_cache=False)
