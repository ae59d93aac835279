"""Tiny random checkpoints on disk, and the cold engine over them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.checkpoints import LATENT, WINDOWED, make_checkpoint, make_latent, make_windowed
from tests.parity.rig import Cold, versions_of

Windowed = Callable[[str, int], tuple[Path, Cold]]
Models = Callable[[str], Path]


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


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Windowed:
    """(family, window) -> a random checkpoint of three layers and the cold engine over it."""

    @functools.cache
    def make(family: str, window: int) -> tuple[Path, Cold]:
        path = tmp_path_factory.mktemp("parity") / f"{family}-{window}"
        make_windowed(family, path, window=window)
        return path, Cold(path)

    return make


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """kind -> a random checkpoint: llama, one with latents, or one with windows of 8 tokens."""

    @functools.cache
    def make(kind: str) -> Path:
        path = tmp_path_factory.mktemp("parity") / kind
        if kind in LATENT:
            make_latent(kind, path)
        elif kind in WINDOWED:
            make_windowed(kind, path, window=8)
        else:
            make_checkpoint(kind, path)
        return path

    return make
