"""The product of issue and design: meshes x attention x page dtypes x tiers x ways of reading.

A cell is one journey: a prompt in chunks, and then the same head with other tails, found on the
device, on the host, or in storage by an engine that starts anew. Its answers, logits and pages are
compared with the cold one rank's.

Where pages are read in place equality is to the last bit (`exact.py`), with tp against a cold row
of so many ranks. Against the cold one rank sums over tp, and partial results that are merged, round
elsewhere: logits are then within 1e-4, and of a page's codes few differ (one that lay on
the edge between two). What a journey may never do is change a byte: every copy anywhere is what
some step has written (`Versions`).
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phloem.cache import check_invariants
from phloem.cache.remote_choice import RemoteChooser
from phloem.core.remote import IN_PLACE, Remote, RemoteWays
from phloem.core.tokens import TOKEN_BYTES
from phloem.tiers import TierConfig
from tests.models.checkpoints import make_checkpoint, make_latent, make_windowed
from tests.models.test_windows import pairwise
from tests.parity.exact import check_exact, sum_row_by_row
from tests.parity.rig import (
    Answer,
    Cold,
    Rig,
    check_all,
    check_logits,
    leaves,
    longest_first,
    raw_copies,
    settle,
)
from tests.parity.test_fast_kernels import NEAR
from tests.parity.test_journeys import words

PAGE = 4
WINDOW = 8
MESHES = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1))  # tp, cp
KINDS = ("heads", "window", "latent")
DTYPES = ("fp32", "bf16", "int8", "fp8", "fp4")
SOURCES = ("device", "host", "storage")
WAYS = {
    "direct": IN_PLACE,
    "gather_kv": RemoteWays.all(Remote.GATHER_KV),
    "send_q": RemoteWays.all(Remote.SEND_Q),
}
Cell = tuple[tuple[int, int], str, str, str, str]
# Of a page's: one on the other side of an edge moves some of those that follow from it.
ODD_CODES = 0.05

PRODUCT = tuple(itertools.product(MESHES, KINDS, DTYPES, SOURCES, tuple(WAYS)))
CELLS = pairwise(MESHES, KINDS, DTYPES, SOURCES, tuple(WAYS))


class Oracles:
    """Models on disk and cold engines over them, made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.path = functools.cache(self._path)
        self._colds: dict[tuple[str, str, str, int], Cold] = {}

    def _path(self, kind: str) -> Path:
        """Three layers, 4 KV heads: what four ranks can divide."""
        path = self._root / kind
        if kind == "latent":
            make_latent("v3", path)
        elif kind == "window":
            make_windowed("gemma2", path, window=WINDOW, num_key_value_heads=4)
        else:
            make_checkpoint("llama-tied", path)
        return path

    def cold(self, kind: str, kernels: str, dtype: str, tp: int = 1) -> Cold:
        key = kind, kernels, dtype, tp
        if key not in self._colds:
            self._colds[key] = Cold(self.path(kind), tp=tp, kernels=kernels, kv_dtype=dtype)
        return self._colds[key]

    def close(self) -> None:
        for cold in self._colds.values():
            cold.close()


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracles]:
    oracles = Oracles(tmp_path_factory.mktemp("matrix"))
    yield oracles
    oracles.close()


def _shape(mesh: tuple[int, int], way: str, dtype: str, kernels: str) -> dict[str, Any]:
    tp, cp = mesh
    return {
        "tp": tp,
        "ranks": cp,
        "remote": WAYS[way],
        "page_size": PAGE,
        "num_pages": 24 * cp * tp,
        "host_pages": 4 * 24 * cp * tp,  # so many that it has copies of what is on the device
        "kv_dtype": dtype,
        "kernels": kernels,
        "max_prefill_tokens": 3 * PAGE,
        "tiers": TierConfig(prefetch_policy="wait_complete"),
    }


def _head(rig: Rig, seed: int) -> list[int]:
    """A head that several requests share, computed in chunks."""
    rng = random.Random(seed)
    head = words(seed, 5 * PAGE + 1)
    for turn in range(3):
        rig.ask(head + words(100 + turn, rng.randrange(1, 9)), rng.randrange(1, 4))
    return head


def _again(rig: Rig, head: list[int], source: str) -> None:
    """Two requests at once that find the head where `source` says."""
    names = [rig.add(head + words(200 + turn, 1 + 5 * turn), 3) for turn in range(2)]
    rig.loop.run_until_idle()
    assert max(getattr(rig.answers[name].sources, source) for name in names) > 0, source


def _is_exact(mesh: tuple[int, int], way: str) -> bool:
    """Whether nothing is merged of parts."""
    return way == "direct" or mesh == (1, 1)


def _check(rig: Rig, oracles: Oracles, cell: Cell, kernels: str) -> None:
    (tp, _), kind, dtype, _, way = cell
    if _is_exact(cell[0], way):
        assert check_exact(rig, oracles.cold(kind, kernels, dtype, tp)) > 0
    if tp > 1 or way != "direct":
        _check_near(rig, oracles.cold(kind, kernels, dtype), dtype)


def _check_near(rig: Rig, cold: Cold, dtype: str) -> None:
    rig.loop.run_until_idle()
    assert all(answer.error is None for answer in rig.answers.values())
    settle(rig)
    check_invariants(rig.cache, idle=True)
    _check_bytes(rig, cold, dtype)
    if dtype == "fp32":
        check_all(rig, cold)
        return
    # A code on an edge may have been rounded the other way, in a page that is not full yet too, and
    # all that follows from it; between two tokens that are as near the choice may be another one.
    for _, answer in longest_first(rig):
        _check_answer(answer, cold, dtype)
    assert check_logits(rig, cold, lambda a, b: _is_near(a, b, dtype)) > 0


def _is_near(ours: torch.Tensor, theirs: torch.Tensor, dtype: str) -> bool:
    """As near as other kernels come with pages of this dtype."""
    return bool((ours - theirs).norm() < NEAR[dtype] * theirs.norm())


def _check_answer(answer: Answer, cold: Cold, dtype: str) -> None:
    """Cold's tokens, at least to where its two best ones are as near as logits may be."""
    logits = cold.logits(tuple(answer.prompt + answer.tokens))[len(answer.prompt) - 1 : -1]
    for token, of_cold in zip(answer.tokens, logits, strict=True):
        if token != int(of_cold.argmax()):
            best, second = of_cold.topk(2).values.tolist()
            assert best - second < NEAR[dtype] * float(of_cold.norm()), f"{answer} is not cold's"
            return


def _check_bytes(rig: Rig, cold: Cold, dtype: str) -> None:
    """Every copy of every page is what a step wrote, and cold's but for rounding."""
    for leaf, packed, places in leaves(rig):
        tokens = np.frombuffer(packed, dtype="<i4").tolist()
        for component, pages in enumerate(cold.raw_pages(tokens, PAGE)):
            for page, ((node, number), expected) in enumerate(zip(places, pages, strict=True)):
                prefix = packed[: (page + 1) * PAGE * TOKEN_BYTES]
                for place, held in raw_copies(rig, node, number, component).items():
                    name = f"page {page} of {leaf}, component {component}, in {place}"
                    made = rig.versions.has(component, prefix, held)
                    assert made or not rig.sees_all, f"nobody computed {name}"
                    wrong = _odd_codes(held, expected, dtype)
                    assert wrong <= ODD_CODES * len(expected), f"{name}: {wrong} codes"


def _odd_codes(held: bytes, expected: bytes, dtype: str) -> int:
    """How many codes are not cold's; numbers that nobody rounds are compared as numbers."""
    if dtype != "fp32":
        a, b = (np.frombuffer(data, dtype=np.uint8) for data in (held, expected))
        return int((a != b).sum())
    a, b = (np.frombuffer(data, dtype=np.float32) for data in (held, expected))
    return int((~np.isclose(a, b, rtol=1e-4, atol=1e-4 * float(np.abs(b).max(initial=0.0)))).sum())


def _play(oracles: Oracles, tmp_path: Path, patch: pytest.MonkeyPatch, cell: Cell) -> None:
    mesh, kind, dtype, source, way = cell
    kernels = "reference" if _is_exact(mesh, way) else "auto"
    if _is_exact(mesh, way):
        sum_row_by_row(patch)
    path, shape = oracles.path(kind), _shape(mesh, way, dtype, kernels)
    with Rig(path, **shape, store=tmp_path) as rig:
        head = _head(rig, PRODUCT.index(cell))
        if source == "host":
            rig.cache.evict(rig.cache.evictable_pages)
        if source != "storage":
            _again(rig, head, source)
        _check(rig, oracles, cell, kernels)
    if source == "storage":
        with Rig(path, **shape, store=tmp_path) as rig:
            _again(rig, head, source)
            _check(rig, oracles, cell, kernels)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_pairs_of_all_axes(
    oracles: Oracles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Any
) -> None:
    """Every two values of different axes meet in one of these cells."""
    _play(oracles, tmp_path, monkeypatch, cell)


@pytest.mark.long
@pytest.mark.parametrize("cell", [cell for cell in PRODUCT if cell not in CELLS], ids=str)
def test_the_whole_product(
    oracles: Oracles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Any
) -> None:
    _play(oracles, tmp_path, monkeypatch, cell)


# Processes live long: each group takes three journeys, from different tiers, in different ways.
GROUPS = [
    ((1, 2), "heads", "bf16", 0),
    ((2, 1), "heads", "int8", 1),
    ((2, 2), "latent", "fp32", 2),
    ((1, 4), "latent", "fp8", 0),
]


@pytest.mark.parametrize(("mesh", "kind", "dtype", "first"), GROUPS, ids=str)
def test_processes_go_through_tiers_and_ways(
    oracles: Oracles, tmp_path: Path, *, mesh: tuple[int, int], kind: str, dtype: str, first: int
) -> None:
    """Twelve cells: freed pages are NaN, cores are given away at random, digests compared."""
    names = tuple(WAYS)
    shape = _shape(mesh, "direct", dtype, "auto")
    with Rig(oracles.path(kind), **shape, store=tmp_path, processes=True) as rig:
        for turn, source in enumerate(SOURCES):
            way = names[(first + turn) % len(names)]
            rig.scheduler.remote = RemoteChooser(WAYS[way])
            head = _head(rig, 1000 + turn)
            if source == "host":
                rig.cache.evict(rig.cache.evictable_pages)
            if source == "storage":
                rig.loop.run_until_idle()
                assert rig.scheduler.tiers.flush(30.0) == 0
                rig.loop.flush()
            _again(rig, head, source)
        _check_near(rig, oracles.cold(kind, "auto", dtype), dtype)
