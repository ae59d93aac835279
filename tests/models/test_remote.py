"""Ranks that keep their pages to themselves, and send pages or queries, equal one rank.

Red if a page or a query that is needed does not travel, if what comes is put in a wrong place, if
parts are merged with a wrong weight or one part twice, or if a page travels before it was written.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from phloem.attention import bands, gather_plan, remote_queries
from phloem.attention import remote as remote_pages
from phloem.core.errors import GroupError
from phloem.core.remote import IN_PLACE, Remote, RemoteWays
from phloem.groups.faulty import FaultyGroup
from tests.long import checkered
from tests.models.ranks import Ranks, Row
from tests.models.test_against_transformers import TOLERANCE, prompt, relative_error
from tests.models.test_ranks import (
    LATENT,
    admit_rows,
    alone,
    assert_equal,
    assert_pages_equal,
    compute,
    kernels,
    owners,
    path,
)

__all__ = ["alone", "kernels", "path"]

GATHER, SEND = (RemoteWays.all(way) for way in (Remote.GATHER_KV, Remote.SEND_Q))
WAYS = (GATHER, SEND)
MIXED = (
    RemoteWays(cached=Remote.SEND_Q, own=Remote.GATHER_KV),
    RemoteWays(cached=Remote.GATHER_KV, own=Remote.SEND_Q),
)


@pytest.fixture(params=WAYS, ids=str)
def remote(request):
    return request.param


@pytest.mark.parametrize(
    ("family", "page_size", "num_ranks", "kind", "kernels", "remote"),
    checkered(
        ("llama", "gemma3", "gpt_oss", "mistral"),
        ((1, 2, "random"), (4, 2, "striped"), (4, 4, "random"), (16, 4, "striped")),
        ("torch", "native"),
        WAYS,
    ),
    indirect=["kernels", "remote"],
    ids=str,
)
def test_ranks_equal_one_rank(path, alone, *, family, page_size, num_ranks, kind, kernels, remote):
    """Chunks whose borders lie anywhere, decodes, windows that slide; and the same pages."""
    ranks = Ranks(path(family), num_ranks, page_size=page_size, kernels=kernels, remote=remote)
    assert_equal(ranks, alone(family, page_size, kernels), kind)


@pytest.mark.parametrize("ways", MIXED, ids=str)
@pytest.mark.parametrize(
    ("family", "num_ranks", "kind"),
    [("llama", 4, "random"), ("gemma3", 2, "striped"), ("v2-lite", 2, "random")],
)
def test_one_way_for_what_was_cached_and_another_for_the_chunk(
    path, alone, family, num_ranks, kind, ways
):
    """Chunks that begin in the middle of a page: such a page is the chunk's own."""
    ranks = Ranks(path(family), num_ranks, page_size=4, kernels="torch", remote=ways)
    assert_equal(ranks, alone(family, 4, "torch"), kind)


@pytest.mark.parametrize(
    ("family", "page_size", "num_ranks", "kind", "ops", "remote"),
    checkered(
        LATENT,
        ((4, 2, "striped"), (1, 4, "random")),
        ("torch", "reference", "native"),
        WAYS,
    ),
    indirect=["remote"],
    ids=str,
)
def test_latents_travel_too(
    path, alone, monkeypatch, *, family, page_size, num_ranks, kind, ops, remote
):
    monkeypatch.setattr(gather_plan, "CONTEXT_BLOCK_TOKENS", 13)
    monkeypatch.setattr(bands, "FULL_BAND", 5)
    ranks = Ranks(path(family), num_ranks, page_size=page_size, kernels=ops, remote=remote)
    assert_equal(ranks, alone(family, page_size, ops), kind)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_a_restart_lower_down(path, family, kernels, remote):
    answers = []
    for num_ranks in (1, 2):
        way = remote if num_ranks > 1 else IN_PLACE
        ranks = Ranks(path(family), num_ranks, page_size=4, kernels=kernels, remote=way)
        ids, kept, start = prompt(100), 18, 4
        ranks.admit(0, Row(ids, owners("striped", num_ranks, 25, 0)))
        ranks.step(ranks.chunk(0, 0, 72))
        ranks.restart(1, ids, kept=kept, start=start, source=0)
        for low, high in ((16, 50), (50, 77), (77, 100)):
            ranks.step(ranks.chunk(1, low, high))
        answers.append(ranks)
    one, two = answers
    assert relative_error(two.row_logits(1), one.row_logits(1)) < TOLERANCE
    assert_pages_equal(two, one, exact=False)


def _swapped(pages, step):
    """The first two staged pages take each other's place."""
    places = step.places.copy()
    places[:2] = places[1::-1]
    return replace(step, places=places)


FAULTS = {
    "none": (None, lambda _: None),
    "a page travels before it is written": (
        GATHER,
        lambda m: m.setattr(
            remote_pages, "_pages_written", lambda shares: np.empty(0, dtype=np.int64)
        ),
    ),
    "two pages are staged in each other's place": (
        GATHER,
        lambda m: m.setattr(
            remote_pages.PageExchange,
            "plan",
            lambda *args, plan=remote_pages.PageExchange.plan: _swapped(args, plan(*args)),
        ),
    ),
    "a partial result is not merged": (
        SEND,
        lambda m: m.setattr(remote_queries, "add_part", lambda *_: None),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_show(path, fault, kernels, monkeypatch):
    """In one chunk of one row; and without a fault all is well."""
    only, apply = FAULTS[fault]
    apply(monkeypatch)
    one = Ranks(path("llama"), 1, page_size=4, kernels=kernels)
    one.admit(0, Row(prompt(40), owners("striped", 1, 10, 0)))
    one.step(one.chunk(0, 0, 40))
    for way in WAYS if only is None else (only,):
        ranks = Ranks(path("llama"), 2, page_size=4, kernels=kernels, remote=way)
        ranks.admit(0, Row(prompt(40), owners("striped", 2, 10, 0)))
        ranks.step(ranks.chunk(0, 0, 40))
        error = relative_error(ranks.row_logits(0), one.row_logits(0))
        assert (error < TOLERANCE) == (fault == "none")


@pytest.mark.parametrize(
    ("family", "kernels", "remote"),
    checkered(("llama", "gemma3"), ("torch", "native"), WAYS),
    indirect=["kernels", "remote"],
    ids=str,
)
def test_ranks_that_come_late_change_nothing(path, family, kernels, remote):
    """Whatever starts late or loses the core: no buffer is filled while it is read, and no order
    of arrival shows, to the last bit."""
    answers = []
    for seed in (None, 1, 2, 3):
        twin = (
            None if seed is None else lambda group, s=seed: FaultyGroup(group, seed=s + group.rank)
        )
        ranks = Ranks(path(family), 4, page_size=4, kernels=kernels, remote=remote, twin=twin)
        admit_rows(ranks)
        compute(ranks, seed=4)
        answers.append([ranks.row_logits(number) for number in range(2)])
    for other in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, answers[0], strict=True))


def test_a_rank_that_leaves_is_an_error_of_the_others(path, kernels, remote):
    """In the middle of a step, and at once."""
    twin = lambda group: FaultyGroup(group, seed=1, leave_after=4 if group.rank else None)  # noqa: E731
    ranks = Ranks(path("llama"), 2, page_size=4, kernels=kernels, remote=remote, twin=twin)
    ranks.admit(0, Row(prompt(40), owners("striped", 2, 10, 0)))
    with pytest.raises(GroupError, match="rank 1"):
        ranks.step(ranks.chunk(0, 0, 40))
