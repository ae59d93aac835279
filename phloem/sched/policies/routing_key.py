"""Requests with the routing key that most running requests have go first, then as `lpm`."""

from __future__ import annotations

from collections.abc import Hashable

from phloem.sched.policies import Policy, PolicyView, Rank
from phloem.sched.state import RequestState

__all__ = ["POLICY"]


def rank(request: RequestState, view: PolicyView) -> Rank:
    key = request.request.routing_key
    other = key is None or key != view.running_key
    return (-request.priority, float(other), -request.matched_pages)


def epoch(view: PolicyView) -> Hashable:
    return view.running_key


POLICY = Policy(rank=rank, epoch=epoch)
