"""Replicas of pages on ranks: what is read in a page's stead, and how many bytes that spares."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from phloem.attention.remote_pages import RankPool
from phloem.core.group import OpKind
from phloem.core.plan import ReplicaPlan, StepPlan
from phloem.core.refs import PageRefs, make_ref
from phloem.core.remote import Remote, RemoteWays
from phloem.groups import Link
from phloem.groups.local import local_groups
from phloem.kernels import KVBuffer
from phloem.worker import load_local_ranks
from phloem.worker.nearest import NearestPages
from tests.models.checkpoints import make_checkpoint
from tests.worker.rank_driver import Logits, RankDriver, striped
from tests.worker.test_local_ranks import PAGE, PAGES, options, prompt

N, P = 3, 8


def refs(*pairs: tuple[int, int]) -> PageRefs:
    """Pages by (owner, slot)."""
    return np.array([make_ref(owner, slot) for owner, slot in pairs], dtype=np.int64)


def flat(*pairs: tuple[int, int]) -> list[int]:
    return [owner * P + slot for owner, slot in pairs]


@pytest.fixture
def ranks() -> list[NearestPages]:
    """Over one memory; page i holds i, as a rank that maps all of them sees it."""
    data = torch.arange(N * P + 1.0).view(-1, 1, 1, 1, 1, 1, 1).repeat(1, 1, 2, 2, 4, 1, 8)
    groups = local_groups(N, timeout_s=60)
    pools = [RankPool(KVBuffer(data), rank, P, rank * P) for rank in range(N)]
    return [NearestPages(pool, N, groups[rank]) for rank, pool in enumerate(pools)]


def contents(ranks: list[NearestPages]) -> list[float]:
    data = ranks[0]._pool.buffer.data.flatten(1)
    assert (data == data[:, :1]).all(), "a page in part"
    return data[:, 0].tolist()


MADE = ReplicaPlan(
    made=refs((0, 1), (0, 2), (1, 3), (2, 0)), made_at=refs((1, 7), (2, 6), (0, 5), (1, 6))
)


@pytest.mark.parametrize("remote", list(Remote))
def test_every_rank_gets_its_copies(ranks, remote):
    """Whole pages, by memory or over the group, whose bytes are counted exactly."""
    plan = StepPlan(step=0, rows=(), remote=RemoteWays.all(remote), replicas=MADE)
    with ThreadPoolExecutor(N) as pool:
        ends = list(pool.map(lambda rank: rank.begin(plan), ranks))
        list(pool.map(lambda end: end(), ends))
    want = [float(page) for page in range(N * P + 1)]
    for page, copy in zip(flat((0, 1), (0, 2), (1, 3), (2, 0)), (15, 22, 5, 14), strict=True):
        want[copy] = float(page)
    assert contents(ranks) == want
    page_bytes = 2 * 2 * 4 * 8 * 4
    traffic = [rank._group.traffic()[OpKind.ALL_TO_ALL] for rank in ranks]
    sent = 0 if remote is Remote.DIRECT else 4 * page_bytes
    assert sum(tally.bytes_sent for tally in traffic) == sent
    assert traffic[0].bytes_sent == sent // 2  # two of its pages


def test_what_is_ready_is_read_by_its_rank_alone_until_it_is_gone(ranks):
    nearest, pages = ranks[0], np.arange(N * P)
    nearest.apply(MADE)  # made is not ready
    assert all((nearest.read_by(rank, pages) == pages).all() for rank in range(N))
    nearest.apply(ReplicaPlan(ready=MADE.made, ready_at=MADE.made_at))
    for rank, pairs in enumerate(({11: 5}, {1: 15, 16: 14}, {2: 22})):
        want = [pairs.get(page, page) for page in range(N * P)]
        assert nearest.read_by(rank, pages).tolist() == want
    # The page of rank 0's replica is another one by now, and gets a replica in another slot.
    again = ReplicaPlan(
        gone=refs((1, 3)), gone_at=refs((0, 5)), ready=refs((1, 3)), ready_at=refs((0, 2))
    )
    nearest.apply(again)
    assert nearest.read_by(0, pages)[11] == 2
    nearest.apply(ReplicaPlan(gone=refs((1, 3), (0, 1)), gone_at=refs((0, 2), (1, 7))))
    assert (nearest.read_by(0, pages) == pages).all()
    assert nearest.read_by(1, pages)[[1, 16]].tolist() == [1, 14]
    nearest.apply(None)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder)
    return folder


Copies = Callable[[RankDriver], ReplicaPlan]


def two_turns(path: Path, remote: Remote, copies: Copies | None) -> tuple[list[int], Logits]:
    """A prompt of 12 pages, then a turn on it; between them replicas are made. The bytes that came
    to each rank in the turn, and all logits."""
    logits, link = Logits(), Link()
    loaded = load_local_ranks(path, options(), 2, hooks=logits.hooks, link=link)
    ranks = RankDriver(loaded.worker, striped(2), size=2, num_pages=PAGES, page_size=PAGE)
    ranks.ways = (RemoteWays.all(remote),)
    ids = prompt(12 * PAGE + 2 * PAGE, 1)
    ranks.admit(0, ids)
    ranks.step(ranks.chunk(0, ids, 0, 12 * PAGE))
    made = None if copies is None else copies(ranks)
    ranks.step(replicas=made)
    ready = None
    if made is not None:
        ready = ReplicaPlan(ready=made.made, ready_at=made.made_at)
    link.carried.clear()
    ranks.step(ranks.chunk(0, ids, 12 * PAGE, 14 * PAGE), replicas=ready)
    carried = [link.carried[rank] for rank in range(2)]
    ranks.step(ranks.decode(0))
    ranks.worker.close()
    return carried, logits


def on_rank_0(ranks: RankDriver, *numbers: int) -> ReplicaPlan:
    """Replicas of these pages of the prompt; rank 1 owns the odd ones."""
    pages = [ranks._tables[0][number] for number in numbers]
    return ReplicaPlan(
        made=np.array(pages), made_at=np.array([ranks._take(0) for _ in pages], dtype=np.int64)
    )


@pytest.mark.parametrize("remote", list(Remote))
def test_a_turn_over_replicas_is_the_same_and_fetches_less(path, remote):
    """Red if a page is gathered or asked for that the rank has, or if the copy differs."""
    carried, logits = two_turns(path, remote, lambda ranks: on_rank_0(ranks, 1, 3, 5, 9))
    plainly, plain = two_turns(path, remote, None)
    for at, row in plain.of[100].items():
        assert (logits.of[100][at] - row).abs().max() <= 1e-4 * row.abs().max(), at
    assert carried[1] == plainly[1] or remote is Remote.SEND_Q
    page_bytes = 3 * 2 * 2 * PAGE * 16 * 4  # layers, K and V, heads
    if remote is Remote.GATHER_KV:
        assert plainly[0] - carried[0] == 4 * page_bytes
    elif remote is Remote.DIRECT:
        assert carried == [0, 0]


def test_queries_whose_pages_are_all_here_stay_here(path):
    def all_of_rank_1(ranks: RankDriver) -> ReplicaPlan:
        return on_rank_0(ranks, *range(1, 12, 2))

    carried, logits = two_turns(path, Remote.SEND_Q, all_of_rank_1)
    plainly, plain = two_turns(path, Remote.SEND_Q, None)
    # Rank 0's page comes before rank 1's: it asks nobody. Rank 1 asks rank 0 for all of its tokens.
    query, part = 4 * 16 * 4, 4 * (16 + 1) * 4
    assert carried == [3 * PAGE * query, 3 * PAGE * part]
    assert plainly == [3 * PAGE * (query + part)] * 2
    for at, row in plain.of[100].items():
        assert (logits.of[100][at] - row).abs().max() <= 1e-4 * row.abs().max(), at
