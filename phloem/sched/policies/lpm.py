"""Longest cached prefix first: what is in the cache is used before it is evicted."""

from __future__ import annotations

from phloem.sched.policies import Policy, PolicyView, Rank
from phloem.sched.state import RequestState

__all__ = ["POLICY"]


def rank(request: RequestState, view: PolicyView) -> Rank:  # noqa: ARG001
    return (-request.priority, -request.matched_pages)


POLICY = Policy(rank=rank)
