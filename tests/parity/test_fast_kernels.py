"""The fast kernels over latents and packed pages: journeys stay near the cold pass.

What is summed together depends on chunks and batches here, so a number at the border of two codes
may fall to either side; `test_dtypes.py` shows that nothing else moves. Bytes are held to what some
step has computed, to the bit.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from phloem.cache import check_invariants
from phloem.core.tokens import TOKEN_BYTES
from phloem.tiers import TierConfig
from tests.kernels.native_build import native_library
from tests.models.checkpoints import make_checkpoint, make_latent
from tests.parity.rig import (
    Cold,
    Rig,
    check_all,
    leaves,
    longest_first,
    raw_copies,
    settle,
    tokens_of,
)
from tests.parity.test_journeys import words
from tests.parity.test_tiers import chat

KERNELS = ["torch", "native"]
# Error of the logits of a position over their norm, at most; a page read as another dtype, or a
# token's scale for another's, is far beyond all of them.
NEAR = {"bf16": 0.01, "int8": 0.03, "fp8": 0.1, "fp4": 0.35}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    native_library()


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fast") / "v3"
    make_latent("v3-yarn", path)
    return path


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fast") / "llama"
    make_checkpoint("llama", path)
    return path


@pytest.mark.parametrize(
    ("kernels", "page_size", "ranks"),
    [("torch", 1, 1), ("torch", 4, 2), ("native", 4, 1), ("native", 1, 2)],
)
def test_a_chat_of_latents_through_host_and_storage_equals_cold(
    latent: Path, tmp_path: Path, kernels: str, page_size: int, ranks: int
) -> None:
    cold = Cold(latent, kernels=kernels)
    pages = 88 // page_size
    shape = {"page_size": page_size, "num_pages": pages, "host_pages": 4 * pages}
    shape["kernels"] = kernels
    shape["tiers"] = TierConfig(prefetch_policy="wait_complete")
    with Rig(latent, **shape, store=tmp_path, ranks=ranks) as rig:
        cached = chat(rig, 50, 9)
        assert all(now > before for before, now in itertools.pairwise(cached))
        assert sum(a.sources.host for a in rig.answers.values()) > 0
        check_all(rig, cold)
        last = max(rig.answers.values(), key=lambda a: len(a.prompt)).prompt
    with Rig(latent, **shape, store=tmp_path) as rig:
        assert rig.ask(last, 3).sources.storage > 0
        check_all(rig, cold)


@pytest.mark.parametrize("kernels", KERNELS)
def test_latents_under_retraction_and_chunks_equal_cold(latent: Path, kernels: str) -> None:
    cold = Cold(latent, kernels="torch")
    shape = {"page_size": 4, "num_pages": 40, "max_prefill_tokens": 16}
    with Rig(latent, **shape, kernels=kernels) as rig:
        for i in range(6):
            rig.add(words(20 + i, 5 + 11 * i), 60)
        rig.loop.run_until_idle()
        assert rig.loop.stats().retractions_total > 0
        check_all(rig, cold)


@pytest.mark.parametrize("kind", ["heads", "latent"])
@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_chat_in_packed_pages_stays_near_cold(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, dtype: str, kernels: str
) -> None:
    """The kernels that find pages in storage are the others: pages do not name who made them."""
    path = request.getfixturevalue(kind)
    other = KERNELS[1 - KERNELS.index(kernels)]
    cold = Cold(path, kernels=kernels, kv_dtype=dtype)
    shape = {"page_size": 4, "num_pages": 18, "host_pages": 80, "max_prefill_tokens": 16}
    shape["tiers"] = TierConfig(prefetch_policy="wait_complete")
    with Rig(path, **shape, kernels=kernels, kv_dtype=dtype, store=tmp_path) as rig:
        chat(rig, 60, 7)
        assert sum(a.sources.host for a in rig.answers.values()) > 0
        check_near(rig, cold, NEAR[dtype])
        last = max(rig.answers.values(), key=lambda a: len(a.prompt)).prompt
    with Rig(path, **shape, kernels=other, kv_dtype=dtype, store=tmp_path) as rig:
        assert rig.ask(last, 3).sources.storage > 0
        check_near(rig, cold, NEAR[dtype])


def check_near(rig: Rig, cold: Cold, limit: float) -> None:
    """Logits near cold's on the tokens that the rig has chosen; copies as some step made them."""
    for _, answer in longest_first(rig):
        cold.logits(tuple(answer.prompt + answer.tokens))
    for serial, by_position in rig.logits.items():
        init = rig.recorder.inits[serial]
        prompt = tokens_of(init)[: init.num_prompt_tokens]
        (answer,) = [a for a in rig.answers.values() if a.prompt == prompt]
        expected = cold.logits(tuple(prompt + answer.tokens))
        for position, logits in by_position.items():
            if position < len(expected):
                error = (logits - expected[position]).norm() / expected[position].norm()
                assert float(error) < limit, f"serial {serial} at {position}: {float(error):.3f}"
        chosen = expected[len(prompt) - 1 : len(prompt) - 1 + len(answer.tokens)]
        best, mine = chosen.amax(dim=-1), chosen.gather(1, torch.tensor(answer.tokens)[:, None])
        assert float((best - mine[:, 0]).max()) < 2 * limit * float(chosen.abs().max())
    settle(rig)
    check_invariants(rig.cache, idle=True)
    for _, packed, places in leaves(rig):
        for page, (node, number) in enumerate(places):
            prefix = packed[: (page + 1) * rig.page_size * TOKEN_BYTES]
            for place, held in raw_copies(rig, node, number).items():
                assert rig.versions.has(0, prefix, held), f"nobody computed page {page} in {place}"
