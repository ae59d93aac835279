"""The cache of a running engine as an operator sees it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from phloem.cache import PrefixCache, check_invariants
from phloem.cache.node import Node
from phloem.cache.remote_choice import RemoteChooser, RemoteDecision
from phloem.core.errors import ConfigError
from phloem.core.tokens import tokens_from_bytes
from phloem.engine.engine_ids import public_id
from phloem.tiers import Decision, Decisions

__all__ = ["list_cache", "list_decisions", "list_remote", "verify_cache"]

HEAD_TOKENS = 32


@dataclass(slots=True)
class _Sum:
    device: int = 0
    host: int = 0
    storage: int = 0
    locked: int = 0
    nodes: int = 0

    def add(self, node: Node) -> None:
        on_device, on_host, stored = node.residence
        pages = node.num_pages
        self.nodes += 1
        self.device += pages * on_device
        self.host += pages * on_host
        self.storage += pages * stored
        self.locked += pages * (node.locks > 0)


def list_cache(cache: PrefixCache, limit: int) -> dict[str, Any]:
    """The largest subtrees below the root: pages by tier, and the tokens that they begin with."""
    root = cache.leader.tree.root
    rows = []
    for child in root.children.values():
        total = _Sum()
        stack = [child]
        while stack:
            node = stack.pop()
            total.add(node)
            stack.extend(node.children.values())
        rows.append((max(total.device, total.host, total.storage), child, total))
    rows.sort(key=lambda row: (-row[0], row[1].id))
    return {"prefixes": [_row(child, total) for _, child, total in rows[:limit]], "of": len(rows)}


def _row(child: Node, total: _Sum) -> dict[str, Any]:
    head = tokens_from_bytes(child.key)[:HEAD_TOKENS]
    return {
        "head": head.tolist(),
        "device_pages": total.device,
        "host_pages": total.host,
        "storage_pages": total.storage,
        "locked_pages": total.locked,
        "nodes": total.nodes,
        "hits": child.hits,
    }


def list_decisions(decisions: Decisions, limit: int, request_id: str | None) -> dict[str, Any]:
    """The newest decisions, and what was expected of the ways that were open."""
    found = decisions.newest(limit, request_id, name_of=public_id)
    return {"decisions": [_decision(each) for each in found]}


def _decision(decision: Decision) -> dict[str, Any]:
    return {
        "request_id": public_id(decision.request_id),
        "prompt_tokens": decision.prompt_tokens,
        "pages": {
            "device": decision.device_pages,
            "host": decision.host_pages - decision.storage_pages,
            "storage": decision.storage_pages,
            "new": decision.new_pages,
        },
        "choice": decision.choice.value,
        "load_pages": decision.load_pages,
        "reason": decision.reason,
        "expected_s": {
            "chosen": decision.chosen_s,
            "load_all": decision.load_all_s,
            "compute_all": decision.compute_all_s,
        },
        "measured": decision.measured,
        "storage": None if decision.storage is None else asdict(decision.storage),
    }


def list_remote(chooser: RemoteChooser | None, limit: int) -> dict[str, Any]:
    """How steps read pages of other ranks: counts, what was measured, and the newest decisions.

    Raises ConfigError where all pages have one owner.
    """
    if chooser is None:
        raise ConfigError("all pages of this engine have one owner: no rank reads pages of others")
    stats = chooser.stats()
    return {
        "steps": [{"cached": c, "own": o, "steps": n} for c, o, n in stats.steps_total],
        "rates": None if stats.rates is None else asdict(stats.rates),
        "decisions": [_of_step(each) for each in chooser.newest(limit)],
    }


def _of_step(decision: RemoteDecision) -> dict[str, Any]:
    ways = [
        {"cached": each.cached.value, "own": each.own.value, "layer_s": each.layer_s}
        for each in decision.choices
    ]
    return {
        "step": decision.step,
        "requests": decision.requests,
        "new_tokens": decision.new_tokens,
        "cached_tokens": decision.cached_tokens,
        "ways": ways,
    }


def verify_cache(cache: PrefixCache) -> dict[str, Any]:
    """Every invariant of the tree, the pools and the locks; the first that does not hold."""
    try:
        check_invariants(cache)
    except AssertionError as error:
        return {"ok": False, "error": str(error)}
    return {"ok": True}
