"""Order of the suite: the rooms that fail fastest come first, the whole house last.

With workers (`make test` has two) it is the other way round: the longest files come first, so that
no worker is left alone with one of them at the end; and no process computes with more threads than
its share of the cores.

What collecting makes (8,000 tests, and all that they import) lives to the end: the garbage
collector is not to look through it again and again.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IS_WORKER:  # before anybody imports torch; processes that tests start inherit it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

gc.disable()  # until all is collected

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
    items.sort(key=_rank, reverse=IS_WORKER)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
