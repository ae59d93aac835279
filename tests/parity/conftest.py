"""Tiny random checkpoints on disk, and the cold engine over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.checkpoints import make_checkpoint
from tests.parity.rig import Cold, versions_of


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama: 3 layers, GQA 4/2, vocabulary 320."""
    path = tmp_path_factory.mktemp("parity") / "llama"
    make_checkpoint("llama", path)
    return path


@pytest.fixture(autouse=True)
def no_versions() -> None:
    """What earlier tests have computed says nothing in this one."""
    versions_of.cache_clear()


@pytest.fixture(scope="session")
def cold(tiny: Path) -> Cold:
    return Cold(tiny)
