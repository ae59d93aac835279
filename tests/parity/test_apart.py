"""Ranks that share no memory, as on several hosts: tokens, logits and pages of the cold one rank.

Ranks are threads with pools and token buffers of their own; of a row each has its heads of a page.
Freed pages are NaN.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from phloem.core.remote import Remote, RemoteWays
from phloem.kv.sizing import least_window_pages
from phloem.models.row import Row
from phloem.worker import SampledTokens
from tests.kernels.native_build import native_library
from tests.models.checkpoints import make_wide
from tests.parity.come_and_go import come_and_go
from tests.parity.conftest import Models, Windowed
from tests.parity.exact import check_exact, sum_row_by_row
from tests.parity.rig import Cold, Rig, check_all
from tests.parity.test_dtypes import journey, shape_of
from tests.parity.test_journeys import words
from tests.parity.test_tiers import chat

# (kind, tp, cp, way, overlap, kernels)
CELLS = [
    ("llama", 1, 2, "send_q", True, "auto"),
    ("llama", 1, 4, "gather_kv", False, "torch"),
    ("v3", 1, 2, "gather_kv", True, "torch"),
    ("v3-yarn", 1, 3, "send_q", True, "torch"),
    ("llama", 2, 1, "gather_kv", True, "torch"),
    ("llama-tied", 2, 2, "send_q", True, "torch"),
    # Latents of rows in short: `test_native_kernels_compute_a_part_of_a_layer`.
    pytest.param("v3", 2, 1, "send_q", False, "torch", marks=pytest.mark.long),
    pytest.param("v3-halves", 2, 2, "gather_kv", True, "torch", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("kind", "tp", "cp", "way", "overlap", "kernels"), CELLS, ids=str)
def test_requests_that_come_and_go_over_a_small_pool(
    models: Models, kind: str, tp: int, cp: int, way: str, overlap: bool, kernels: str
) -> None:
    """A request's next token is often sampled by another rank than those that compute it. Rows
    compare what is free in every step."""
    path, rng = models(kind), random.Random(f"{kind} {tp * cp}")
    with Rig(
        path,
        page_size=4,
        num_pages=60,
        max_prefill_tokens=20,
        max_running=4,
        ranks=cp,
        tp=tp,
        overlap=overlap,
        kernels=kernels,
        remote=RemoteWays.all(Remote(way)),
        apart=True,
        verify=tp > 1,
    ) as rig:
        come_and_go(rig, rng, 12)
        check_all(rig, Cold(path))


@pytest.mark.parametrize(
    ("family", "tp", "cp", "way"),
    [
        ("gemma3", 1, 2, "send_q"),
        ("mistral", 1, 3, "gather_kv"),
        ("gpt_oss", 2, 1, "send_q"),
        ("gemma3", 2, 2, "gather_kv"),
    ],
)
def test_windows_have_pools_of_their_own_too(
    windowed: Windowed, family: str, tp: int, cp: int, way: str
) -> None:
    path, cold = windowed(family, 16)
    with Rig(
        path,
        page_size=4,
        num_pages=60,
        window_pages=cp * (least_window_pages(16, 4) + 2),
        ranks=cp,
        tp=tp,
        remote=RemoteWays.all(Remote(way)),
        apart=True,
    ) as rig:
        chat(rig, 50, 6)
        check_all(rig, cold)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("gemma2", "int8"),
        *(
            pytest.param(*cell, marks=pytest.mark.long)
            for cell in (("llama", "fp4"), ("llama-tied", "fp8"), ("gpt_oss", "bf16"))
        ),
    ],
)
def test_each_rank_of_a_row_has_the_bytes_of_its_heads(
    models: Models, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    """To the last bit: a cold row that shares memory, whose sums are the same. Side by side the
    ranks' parts are a page; and none holds more than its part."""
    sum_row_by_row(monkeypatch)
    path = models(kind)
    cold = Cold(path, tp=2, kernels="reference", kv_dtype=dtype)
    with Rig(path, **shape_of(dtype, 4, 2), tp=2, apart=True) as rig:
        for spec, pool in zip(rig.loaded.specs, rig.loaded.pools, strict=True):
            assert 2 * pool.buffer.data[0].nbytes == spec.page_bytes
        journey(rig, words(1, 14), 3)
        assert sum(answer.cached for answer in rig.answers.values()) > 0
        assert check_exact(rig, cold) > 0
    cold.close()


@pytest.mark.parametrize(
    ("kind", "cp", "way"),
    [
        ("llama", 2, "send_q"),
        ("gemma3", 2, "gather_kv"),
        ("v3", 2, "send_q"),
        ("gpt_oss", 1, "send_q"),
    ],
)
def test_native_kernels_compute_a_part_of_a_layer(
    tmp_path: Path, kind: str, cp: int, way: str
) -> None:
    """An MLP wide enough that half of it is whole panels."""
    native_library()
    windows = {"window_pages": 30} if make_wide(kind, tmp_path) else {}
    cold = Cold(tmp_path)
    with Rig(
        tmp_path,
        page_size=4,
        num_pages=40,
        ranks=cp,
        tp=2,
        kernels="native",
        remote=RemoteWays.all(Remote(way)),
        apart=True,
        **windows,
    ) as rig:
        chat(rig, 40, 4)
        check_all(rig, cold)


def fails(models: Models, *, tp: int, cp: int) -> None:
    """A request is not what the cold one is."""
    path, remote = models("llama"), RemoteWays.all(Remote.GATHER_KV)
    with Rig(path, page_size=4, num_pages=40, ranks=cp, tp=tp, remote=remote, apart=True) as rig:
        rig.ask(words(1, 21), 12)
        with pytest.raises(AssertionError):
            check_all(rig, Cold(path))


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 1)])
def test_a_token_that_does_not_travel_is_noticed(
    models: Models, monkeypatch: pytest.MonkeyPatch, tp: int, cp: int
) -> None:
    """A mutation: nobody takes in what other ranks have sampled, in another row or in its own."""
    monkeypatch.setattr(SampledTokens, "write", lambda *_: None)
    fails(models, tp=tp, cp=cp)


def test_a_summand_that_is_left_out_is_noticed(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Row, "add_up", lambda _self, summand: summand)
    fails(models, tp=2, cp=1)
