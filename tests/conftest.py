"""Order of the suite: the rooms that fail fastest come first, the whole house last."""

from __future__ import annotations

from pathlib import Path

import pytest

# A room that is not named here runs after the named ones, before e2e.
ORDER = (
    "house",
    "core",
    "kv",
    "config",
    "replica",
    "cache",
    "sched",
    "loop",
    "sim",
    "stores",
    "cli",
    "bench",
    "kernels",
    "pools",
    "attention",
    "layers",
    "models",
    "worker",
    "server",
    "engine",
)
_TESTS = Path(__file__).parent


def _rank(item: pytest.Item) -> int:
    parts = item.path.relative_to(_TESTS).parts
    if parts[0] == "e2e":
        return len(ORDER) + 1
    return ORDER.index(parts[0]) if parts[0] in ORDER else len(ORDER)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A stable sort: inside a room the order of files and of tests stays."""
    items.sort(key=_rank)
