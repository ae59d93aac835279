"""Ranks that share requests compute what one rank computes, whoever owns what.

Red if a rank computes a token that it does not own or leaves one out, sees a key too few or too
many, attends before the others have written, or writes where it must not.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from phloem.attention import bands, gather_plan
from phloem.kv.spec import KVDtype
from phloem.worker.inputs import RankShare, StepInputs
from tests.kernels.native_build import native_library
from tests.long import checkered
from tests.models.checkpoints import make_checkpoint, make_latent, make_windowed
from tests.models.ranks import FULL, WINDOW, Ranks, Row
from tests.models.test_against_transformers import TOLERANCE, prompt, relative_error

WINDOW_TOKENS = 16
FAMILIES = ("llama", "gemma3", "gpt_oss", "mistral")
LATENT = ("v2-lite", "v3-yarn")
LENGTHS = (83, 41)  # of the two rows: prompt and decodes
DECODES = 6


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """family -> a checkpoint; llama has no window, mistral nothing else."""

    @cache
    def make(family):
        folder = tmp_path_factory.mktemp(family)
        if family == "llama":
            make_checkpoint(family, folder)
        elif family in LATENT:
            make_latent(family, folder)
        else:
            make_windowed(family, folder, window=WINDOW_TOKENS)
        return folder

    return make


@pytest.fixture(params=["torch", "native"])
def kernels(request, monkeypatch):
    monkeypatch.setattr(gather_plan, "CONTEXT_BLOCK_TOKENS", 13)
    monkeypatch.setattr(gather_plan, "MIN_BAND", 8)
    monkeypatch.setattr(bands, "FULL_BAND", 5)
    if request.param == "native":
        native_library()
    return request.param


def owners(kind: str, num_ranks: int, num_pages: int, seed: int) -> np.ndarray:
    if kind == "striped":
        return (seed + np.arange(num_pages)) % num_ranks
    return np.random.default_rng(seed).integers(0, num_ranks, num_pages)


def admit_rows(ranks: Ranks, kind: str = "striped") -> None:
    for number, length in enumerate(LENGTHS):
        num_pages = -(-length // ranks.page_size)
        own = owners(kind, ranks.num_ranks, num_pages, number)
        ranks.admit(number, Row(prompt(length, number), own))


def compute(ranks: Ranks, borders: list[int] | None = None, seed: int = 0) -> None:
    """Both rows in chunks whose borders lie anywhere, then some decodes; windows slide."""
    rng = np.random.default_rng(seed)
    done = [0, 0]
    while done != list(LENGTHS):
        plans = []
        for number, length in enumerate(LENGTHS):
            low, last = done[number], length - DECODES
            if low == length:
                continue
            most = 1 if low >= last else min(last - low, int(rng.integers(1, 40)))
            if borders is not None and low < last:
                most = min(b for b in (*borders, last) if b > low) - low
            plans.append(ranks.chunk(number, low, low + most))
            done[number] += most
        ranks.step(*plans)
        if ranks.config.window is not None:
            for number, end in enumerate(done):
                ranks.slide(number, end, ranks.config.window)


@pytest.fixture(scope="module")
def alone(path):
    """(family, page size, kernels) -> one rank that has computed both rows, whoever asks."""

    @cache
    def make(family: str, page_size: int, ops: str) -> Ranks:
        one = Ranks(path(family), 1, page_size=page_size, kernels=ops)
        admit_rows(one)
        compute(one, seed=page_size)
        return one

    return make


def assert_equal(ranks: Ranks, one: Ranks, kind: str) -> None:
    """Logits of all tokens and all pages; `one` has computed already."""
    admit_rows(ranks, kind)
    compute(ranks, seed=ranks.page_size)
    for number, length in enumerate(LENGTHS):
        got, want = ranks.row_logits(number), one.row_logits(number)
        assert len(got) == length
        assert relative_error(got, want) < TOLERANCE
    assert_pages_equal(ranks, one, exact=False)


def pages_of(ranks: Ranks, component: int) -> list[torch.Tensor]:
    return [
        ranks.page(number, i, component)
        for number, row in ranks.rows.items()
        for i in range(len(row.owners))
    ]


def assert_pages_equal(ranks: Ranks, one: Ranks, *, exact: bool) -> None:
    """NaN where nothing was written, on both."""
    for component in range(len(one.pools[0])):
        parts = zip(pages_of(ranks, component), pages_of(one, component), strict=True)
        for got, want in parts:
            assert torch.equal(got.isnan(), want.isnan()), "written where one rank does not write"
            if exact:
                assert torch.equal(got.nan_to_num(), want.nan_to_num())
            else:
                torch.testing.assert_close(got, want, rtol=0, atol=2e-4, equal_nan=True)


@pytest.mark.parametrize(
    ("family", "page_size", "num_ranks", "kind", "kernels"),
    checkered(FAMILIES, (1, 4, 16), (2, 4), ("striped", "random"), ("torch", "native")),
    indirect=["kernels"],
)
def test_ranks_equal_one_rank(path, alone, family, page_size, num_ranks, kind, kernels):
    """Logits of all tokens and all pages, in chunks whose borders lie anywhere."""
    ranks = Ranks(path(family), num_ranks, page_size=page_size, kernels=kernels)
    assert_equal(ranks, alone(family, page_size, kernels), kind)


@pytest.mark.parametrize("family", LATENT)
@pytest.mark.parametrize(("page_size", "num_ranks", "kind"), [(4, 2, "striped"), (1, 4, "random")])
@pytest.mark.parametrize("kernels", ["torch", "reference", "native"])
def test_ranks_share_latents(
    path, alone, monkeypatch, *, family, page_size, num_ranks, kind, kernels
):
    """As above, of one row a token that all heads share; a prefill between gaps is absorbed."""
    monkeypatch.setattr(gather_plan, "CONTEXT_BLOCK_TOKENS", 13)
    monkeypatch.setattr(bands, "FULL_BAND", 5)
    ranks = Ranks(path(family), num_ranks, page_size=page_size, kernels=kernels)
    assert_equal(ranks, alone(family, page_size, kernels), kind)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [KVDtype.FP32, KVDtype.BF16], ids=lambda d: d.value)
def test_native_ranks_equal_one_rank_to_the_last_bit(path, family, dtype):
    """Where no rank has a single token of a chunk, which takes the kernel of decodes."""
    native_library()
    one, ranks = (
        Ranks(path(family), n, page_size=4, kernels="native", dtype=dtype) for n in (1, 2)
    )
    for each in (one, ranks):
        admit_rows(each)
        compute(each, borders=[10, 36, 39, 59, 71])
    for number in range(2):
        assert torch.equal(ranks.row_logits(number), one.row_logits(number))
    assert_pages_equal(ranks, one, exact=True)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_a_restart_lower_down_on_ranks(path, family, kernels):
    """Full pages are kept, window state is not: computed again from lower down, written where it
    is not kept, and by whoever owns the page."""
    answers = []
    for num_ranks in (1, 2):
        ranks = Ranks(path(family), num_ranks, page_size=4, kernels=kernels)
        ids, kept, start = prompt(100), 18, 4
        ranks.admit(0, Row(ids, owners("striped", num_ranks, 25, 0)))
        ranks.step(ranks.chunk(0, 0, 72))
        before = [ranks.page(0, i, FULL).clone() for i in range(kept)]
        ranks.restart(1, ids, kept=kept, start=start, source=0)
        for low, high in ((16, 50), (50, 77), (77, 100)):
            ranks.step(ranks.chunk(1, low, high))
        assert all(torch.equal(ranks.page(0, i, FULL), page) for i, page in enumerate(before))
        answers.append(ranks)
    one, two = answers
    assert relative_error(two.row_logits(1), one.row_logits(1)) < TOLERANCE
    assert_pages_equal(two, one, exact=False)


def test_who_computes_and_who_samples(path, kernels):
    """Each token on the owner of its page; the next one is drawn where the last one lies; a rank
    without tokens passes all layers."""
    ranks = Ranks(path("llama"), 4, page_size=4, kernels=kernels)
    ranks.admit(0, Row(prompt(40), np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])))
    ranks.admit(1, Row(prompt(40), np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 1])))
    ranks.step(ranks.chunk(0, 0, 22), ranks.chunk(1, 0, 3))
    positions = [[s.positions().tolist() for s in inputs.batches[0].spans] for inputs in ranks.last]
    assert positions[0] == [[0, 1, 2, 3, 12, 13, 14, 15]]
    assert positions[1] == [[4, 5, 6, 7, 16, 17, 18, 19], [0, 1, 2]]
    assert positions[2] == [[8, 9, 10, 11, 20, 21]]
    assert positions[3] == []
    assert [[r.row for r in inputs.rows] for inputs in ranks.last] == [[0], [0, 1], [0], []]
    assert [[r.row for r in inputs.sampled] for inputs in ranks.last] == [[], [1], [0], []]
    assert ranks.last[2].last_index.tolist() == [5]
    assert ranks.last[1].last_index.tolist() == [10]
    assert ranks.calls == [[0, 1, 2]] * 4, "every layer, in its order, told to every rank"


def test_a_rank_that_owns_all_of_a_step_gets_the_inputs_of_one_rank(path):
    ranks = Ranks(path("gpt_oss"), 2, page_size=4, kernels="torch")
    ranks.admit(0, Row(prompt(40), np.ones(10, dtype=np.int64)))
    built = []
    for share in (None, RankShare(1, ranks.pages_per_rank)):
        ranks.share_of = lambda rank, share=share: share if rank else RankShare(9, 1)
        ranks.logits[0] = {}
        ranks.step(ranks.chunk(0, 5, 30))
        built.append(ranks.last[1])
    whole, mine = built
    assert torch.equal(whole.tokens, mine.tokens)
    assert torch.equal(whole.positions, mine.positions)
    assert whole.rows == mine.rows == whole.sampled == mine.sampled
    for ours, theirs in zip(whole.batches, mine.batches, strict=True):
        (left,), (right,) = ours.spans, theirs.spans
        assert right.at is None
        assert torch.equal(torch.from_numpy(left.slots), torch.from_numpy(right.slots))
        assert replace(left, slots=right.slots) == right


def two_ranks_and_one(path, kernels: str) -> tuple[Ranks, Ranks]:
    both = tuple(Ranks(path("gemma3"), n, page_size=4, kernels=kernels) for n in (2, 1))
    for ranks in both:
        admit_rows(ranks)
    both[1].step(both[1].chunk(0, 0, 33))
    return both


def differs(ranks: Ranks, one: Ranks) -> bool:
    got, want = ranks.row_logits(0), one.row_logits(0)
    return not (len(got) == len(want) and relative_error(got, want) < TOLERANCE)


def test_without_a_fault_they_agree(path, kernels):
    """What the three faults below change."""
    ranks, one = two_ranks_and_one(path, kernels)
    ranks.step(ranks.chunk(0, 0, 33))
    assert not differs(ranks, one)


def test_a_wrong_owner_map_shows(path, kernels):
    """Rank 1 believes that pools are one page larger."""
    ranks, one = two_ranks_and_one(path, kernels)
    size = ranks.pages_per_rank
    ranks.rows[0].pages[FULL][1] = size  # the page that is owned by another one then
    ranks._write_table(0)
    ranks.share_of = lambda rank: RankShare(rank, size + rank)
    ranks.step(ranks.chunk(0, 0, 33))
    assert differs(ranks, one)


def test_a_write_that_one_rank_leaves_out_shows(path, kernels):
    """In one component, of one page."""
    ranks, one = two_ranks_and_one(path, kernels)

    def alter(rank: int, inputs: StepInputs) -> StepInputs:
        if rank == 0:
            return inputs
        (span,), size = inputs.batches[WINDOW].spans, inputs.batches[WINDOW].page_size
        silent = replace(inputs.batches[WINDOW], spans=(replace(span, write_from=2 * size),))
        return replace(inputs, batches=(inputs.batches[FULL], silent))

    ranks.alter = alter
    ranks.step(ranks.chunk(0, 0, 33))
    assert differs(ranks, one)


def test_attending_before_the_others_have_written_shows(path, kernels):
    ranks, one = two_ranks_and_one(path, kernels)
    ranks.step_one_by_one(ranks.chunk(0, 0, 33))
    assert differs(ranks, one)
