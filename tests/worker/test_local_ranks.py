"""Ranks as threads: whatever rank owns a page, answers are those of one rank that owns them all."""

from __future__ import annotations

import threading
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from phloem.core.errors import EngineDead
from phloem.core.plan import StepPlan
from phloem.core.remote import Remote, RemoteWays
from phloem.core.request import SamplingParams
from phloem.worker import (
    Peers,
    RankHooks,
    WorkerOptions,
    load_local_ranks,
    load_worker,
    runner,
)
from tests.kernels.native_build import native_library
from tests.models.checkpoints import make_checkpoint
from tests.worker.rank_driver import GREEDY, Logits, Owner, RankDriver, striped

PAGE = 4
PAGES = 96

OWNERS = {
    "striped": striped,
    "contiguous": lambda size: lambda row, page: (row + page // 3) % size,
    "one": lambda size: lambda _row, _page: size - 1,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder)
    return folder


def options(**more) -> WorkerOptions:
    chosen = {"dtype": "fp32", "page_size": PAGE, "num_pages": PAGES, "threads": 1, **more}
    return WorkerOptions(max_running=8, **chosen)


def driver(path: Path, size: int, owner: Owner, **more) -> tuple[RankDriver, Logits]:
    logits = Logits()
    if size == 1:
        loaded = load_worker(path, options(hooks=logits.hooks(0), **more))
    else:
        loaded = load_local_ranks(path, options(**more), size, hooks=logits.hooks)
    return (
        RankDriver(loaded.worker, owner, size=size, num_pages=PAGES, page_size=PAGE),
        logits,
    )


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 320, length).tolist()


SAMPLED = SamplingParams(
    temperature=1.5,
    top_p=0.95,
    presence_penalty=0.7,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    max_tokens=100,
)


def session(ranks: RankDriver) -> None:
    """Chunks that end within pages, a shared prefix, futures two steps deep, rows that leave."""
    one, two, three = prompt(43, 1), prompt(9, 2), prompt(30, 3)
    three[:20] = one[:20]
    ranks.admit(0, one)
    ranks.step(ranks.chunk(0, one, 0, 18))
    ranks.admit(1, two, sampling=SAMPLED, seed=7)
    ranks.step(ranks.chunk(0, one, 18, 43), ranks.chunk(1, two, 0, 9))
    ranks.admit(2, three, shared_with=0, shared_pages=5, sampling=SAMPLED, seed=8)
    ranks.step(ranks.chunk(2, three, 20, 30), ranks.decode(0), ranks.decode(1))
    ranks.submit(ranks.decode(0, 2), ranks.decode(1, 2), ranks.decode(2, 1))
    for index in range(3, 17):  # one step ahead, as the loop plans
        ranks.submit(ranks.decode(0, index), ranks.decode(1, index), ranks.decode(2, index - 1))
        ranks.collect()
    ranks.collect()
    ranks.release(1)
    ranks.admit(3, two)
    ranks.step(ranks.chunk(3, two, 0, 9), ranks.decode(2))
    for _ in range(5):
        ranks.step(ranks.decode(3), ranks.decode(2))


@pytest.fixture(scope="module")
def alone(path: Path) -> tuple[RankDriver, Logits]:
    ranks, logits = driver(path, 1, lambda _row, _page: 0)
    session(ranks)
    ranks.worker.close()
    return ranks, logits


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("owner", sorted(OWNERS))
def test_answers_and_logits_are_those_of_one_rank(path, alone, size, owner) -> None:
    """Red if a page is read before its owner wrote it, a token is not passed on, a penalty is
    counted by one rank alone, or a freed page (NaN) is read."""
    ranks, logits = driver(path, size, OWNERS[owner](size))
    session(ranks)
    ranks.worker.close()
    check_same(ranks, logits, alone)
    used = {rank for ranks_of in logits.ranks.values() for rank in ranks_of.values()}
    assert used == ({size - 1} if owner == "one" else set(range(size)))


def check_same(ranks: RankDriver, logits: Logits, alone: tuple[RankDriver, Logits]) -> None:
    assert ranks.sampled == alone[0].sampled
    assert logits.of.keys() == alone[1].of.keys()
    for serial in logits.of:
        ours, theirs = logits.stacked(serial), alone[1].stacked(serial)
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("size", [2, 3])
def test_copies_of_all_pages_on_every_rank_give_the_same(path, alone, size) -> None:
    """Red if a page is computed by nobody, or read before its copy is there: freed ones are NaN."""
    logits = Logits()
    loaded = load_local_ranks(path, options(replicate=True), size, hooks=logits.hooks)
    one_pool = {"size": 1, "num_pages": PAGES, "page_size": PAGE}
    ranks = RankDriver(loaded.worker, lambda _row, _page: 0, **one_pool)
    ranks.step()  # every rank fills its own copies with NaN before another one writes to them
    session(ranks)
    ranks.worker.close()
    check_same(ranks, logits, alone)
    used = {rank for ranks_of in logits.ranks.values() for rank in ranks_of.values()}
    assert used == set(range(size))


WAYS = {
    "gather_kv": (RemoteWays.all(Remote.GATHER_KV),),
    "send_q": (RemoteWays.all(Remote.SEND_Q),),
    "anew": tuple(RemoteWays(cached=a, own=b) for b in Remote for a in Remote),
}


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(("size", "ways"), [(2, "gather_kv"), (4, "send_q"), (3, "anew")])
def test_pages_and_queries_that_travel_give_the_same(path, alone, size, ways, kernels) -> None:
    """In whatever ways each step says. Red if a rank without tokens leaves a layer out, if a page
    is sent before it is written, or if one that is read in place is not waited for."""
    if kernels == "native":
        native_library()
    ranks, logits = driver(path, size, striped(size), kernels=kernels)
    ranks.ways = WAYS[ways]
    session(ranks)
    ranks.worker.close()
    check_same(ranks, logits, alone)


TRAVEL = (Remote.GATHER_KV, Remote.SEND_Q)
APART = {
    "gather_kv": (RemoteWays.all(Remote.GATHER_KV),),
    "send_q": (RemoteWays.all(Remote.SEND_Q),),
    "anew": tuple(RemoteWays(cached=a, own=b) for a, b in product(TRAVEL, repeat=2)),
}


@pytest.mark.parametrize(
    ("size", "tp", "ways"),
    [(2, 1, "gather_kv"), (4, 1, "send_q"), (3, 1, "anew"), (1, 2, "send_q"), (2, 2, "anew")],
)
def test_ranks_that_share_no_memory_give_the_same(path, alone, size, tp, ways) -> None:
    """As on several hosts. Red if a sampled token does not travel, if a penalty is counted by one
    rank alone, or if a rank looks for a page where all ranks' pools would be."""
    logits = Logits()
    loaded = load_local_ranks(path, options(), size, tp=tp, hooks=logits.hooks, maps_pools=False)
    assert [pool.num_owners for pool in loaded.pools] == [1]
    ranks = RankDriver(loaded.worker, striped(size), size=size, num_pages=PAGES, page_size=PAGE)
    ranks.ways = APART[ways]
    session(ranks)
    ranks.worker.close()
    check_same(ranks, logits, alone)


def test_each_rank_computes_the_tokens_of_its_own_pages(path) -> None:
    ranks, logits = driver(path, 2, striped(2))
    ids = prompt(23, 4)
    ranks.admit(0, ids)
    ranks.step(ranks.chunk(0, ids, 0, 23))
    ranks.worker.close()
    assert [logits.ranks[100][at] for at in range(23)] == [at // PAGE % 2 for at in range(23)]


def test_one_message_per_step_and_rank(path) -> None:
    ranks, _ = driver(path, 3, striped(3))
    ids = prompt(10, 5)
    ranks.admit(0, ids)
    ranks.step(ranks.chunk(0, ids, 0, 10))
    for _ in range(4):
        ranks.step(ranks.decode(0))
    assert ranks.worker.messages == {1: 5, 2: 5}
    ranks.worker.close()


def test_a_cancelled_step_ends_on_all_ranks(path) -> None:
    """Nobody waits for a layer that another rank has given up."""
    ranks, _ = driver(path, 2, striped(2))
    ids = prompt(40, 6)
    ranks.admit(0, ids)
    ranks.worker.cancel(100)
    ranks.submit(ranks.chunk(0, ids, 0, 40))
    (row,) = ranks.worker.collect().rows
    assert row.error is not None or row.token >= 0  # it may have been too late
    ranks.release(0)
    ranks.admit(1, ids[:9], sampling=GREEDY)
    assert len(ranks.step(ranks.chunk(1, ids[:9], 0, 9)).rows) == 1
    ranks.worker.close()


def test_a_wait_that_is_skipped_shows(path, monkeypatch) -> None:
    """A mutation: rank 0 waits for nobody, and rank 1 comes late. Freed pages are NaN, so the
    comparison above could not have passed."""
    over = threading.Event()
    real_written, real_finished = Peers.written, Peers.finished

    def written(self: Peers, step: int, layer: int) -> None:
        if self.rank == 0:
            self.post(step, layer)
            return
        assert over.wait(60.0)
        real_written(self, step, layer)

    def finished(self: Peers, step: int, *sampled: object) -> None:
        real_finished(self, step, *sampled)
        if self.rank == 0:
            over.set()

    ranks, logits = driver(path, 2, striped(2))
    first = prompt(5, 2)
    ranks.admit(1, first)
    ranks.step(ranks.chunk(1, first, 0, 5))  # after it all other pages of both ranks are NaN
    monkeypatch.setattr(Peers, "written", written)
    monkeypatch.setattr(Peers, "finished", finished)
    ids = prompt(43, 1)
    ranks.admit(0, ids)
    ranks.step(ranks.chunk(0, ids, 0, 18))
    ranks.worker.close()
    wrong = [at for at in range(18) if logits.of[100][at].isnan().any()]
    assert set(wrong) >= set(range(2 * PAGE, 18))  # what reads page 1 on rank 0, what reads that


class Other:
    """A rank's copy of the cache that has gone astray."""

    def apply(self, log: bytes) -> None:
        """It does not listen."""

    def digest(self) -> str:
        return "5:bad"


def test_a_rank_whose_cache_differs_stops_all_with_both_digests(path) -> None:
    loaded = load_local_ranks(path, options(), 2, replicas=lambda _rank: Other())
    logs = iter([(b"", None), (b"", "5:good")])
    failed = threading.Event()
    loaded.worker.connect(RankHooks(log=lambda: next(logs), on_failure=failed.set))
    for step in range(2):
        loaded.worker.submit(StepPlan(step=step, rows=()))
    assert failed.wait(20.0)
    with pytest.raises(EngineDead, match=r"^rank 1 failed: its cache differs .*5:good.*5:bad$"):
        loaded.worker.collect()
    loaded.worker.close()


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failing_rank_is_named(path, monkeypatch, failing) -> None:
    """With its own words, although the others are the first to be heard."""
    ranks, _ = driver(path, 3, striped(3))
    ids = prompt(40, 7)
    ranks.admit(0, ids)
    bad = ranks.chunk(0, ids, 0, 40)
    real = runner.build_inputs

    def broken(plan, tables, *, share, **more):
        if share.rank == failing:
            raise ValueError("broken on purpose")
        return real(plan, tables, share=share, **more)

    monkeypatch.setattr(runner, "build_inputs", broken)
    complained = threading.Event()
    ranks.worker.connect(RankHooks(on_failure=complained.set))
    ranks.submit(bad)
    assert complained.wait(20.0)
    named = rf"^rank {failing} failed: ValueError: broken on purpose$"
    with pytest.raises(EngineDead, match=named):
        ranks.worker.collect()
    ranks.worker.close()


def test_pages_are_read_whoever_owns_them(path) -> None:
    """The same bytes as one rank computes, by reference."""
    ids = prompt(16, 8)
    pages = []
    for size in (1, 2):
        ranks, _ = driver(path, size, striped(size))
        ranks.admit(0, ids, room=0)
        ranks.step(ranks.chunk(0, ids, 0, 16))
        read = [ranks.worker.read_page(ref) for ref in ranks._tables[0]]
        pages.append([torch.frombuffer(bytearray(p), dtype=torch.float32) for p in read])
        ranks.worker.close()
    for one, two in zip(*pages, strict=True):
        assert (one - two).abs().max() <= 1e-4 * one.abs().max()
