"""Scheduling policies, one per file: `get_policy(name)` imports the module of that name.

A policy is a pure function `rank(request, view) -> tuple`: the lowest rank goes first, ties by
arrival. To add one, add a file with `POLICY = Policy(...)`; nothing else changes.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeAlias

from phloem.core.errors import ConfigError
from phloem.sched.state import RequestState

__all__ = ["Policy", "PolicyView", "Rank", "get_policy", "policy_names"]

Rank: TypeAlias = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyView:
    """What a policy may look at besides the request itself."""

    pass_no: int
    planned_tokens: int  # of all steps so far: a clock that counts work, not seconds
    running_key: str | None  # the routing key most common among running requests


def _always_valid(view: PolicyView) -> Hashable:  # noqa: ARG001 - the signature is the contract
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the queue is ordered."""

    rank: Callable[[RequestState, PolicyView], Rank]
    # Ranks taken under one epoch stay comparable; when it changes, the whole queue is ranked anew.
    epoch: Callable[[PolicyView], Hashable] = _always_valid
    uses_cache: bool = True  # ranks depend on the cached prefix, so it is kept fresh


def policy_names() -> tuple[str, ...]:
    """Every policy there is: one module of this package each."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def get_policy(name: str) -> Policy:
    """The policy called `name`. Raises ConfigError for an unknown one."""
    if name not in policy_names():
        raise ConfigError(f"unknown schedule policy {name!r}; choose from {policy_names()}")
    policy = importlib.import_module(f"{__name__}.{name}").POLICY
    assert isinstance(policy, Policy), f"{name}.POLICY is no Policy"
    return policy
