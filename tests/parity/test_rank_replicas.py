"""Ranks that read copies of each other's hot pages: all journeys equal the cold one rank.

Replicas are made and dropped all the time, freed slots are NaN, every rank's copy of the cache is
compared with the leader's in every step, and every replica's bytes with its page's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from phloem.cache import ReplicaConfig
from phloem.cache.page_replicas import PageReplicas
from phloem.cache.remote_choice import RemoteChooser
from phloem.cache.replica_ledger import ReplicaLedger
from phloem.core.plan import ReplicaPlan
from phloem.core.remote import Remote, RemoteWays
from phloem.kv.sizing import least_window_pages
from phloem.tiers import TierConfig
from phloem.worker.nearest import NearestPages
from tests.models.test_windows import pairwise
from tests.parity.conftest import Models, Windowed
from tests.parity.exact import check_exact, sum_row_by_row
from tests.parity.rig import Cold, Rig, check_all, check_logits
from tests.parity.test_journeys import words
from tests.parity.test_ranks import PLACEMENTS
from tests.parity.test_tiers import chat

EAGER = ReplicaConfig(fraction=0.5, reserve=0.0, reads=1, half_life_steps=16, pages_per_step=4)
WAYS = ("direct", "gather_kv", "send_q", "anew")
CASES = pairwise((2, 4), PLACEMENTS, (1, 4), WAYS, (True, False), ("auto", "torch"))


def ways_of(way: str) -> RemoteWays:
    return RemoteWays.all(Remote(way if way != "anew" else "direct"))


def set_way(rig: Rig, way: str, rng: random.Random) -> None:
    """How the next steps read remote pages."""
    ways = ways_of(way)
    if way == "anew":
        ways = RemoteWays(cached=rng.choice(list(Remote)), own=rng.choice(list(Remote)))
    rig.scheduler.remote = RemoteChooser(ways)


def check_replicas(rig: Rig) -> None:
    """Between steps: what may be read is its page to the last bit."""
    replicas = rig.cache.state.replicas
    for page, replica in replicas.pairs():
        if replicas.is_ready(replica):
            assert rig.loaded.pool.read(page) == rig.loaded.pool.read(replica), replica


def journey(rig: Rig, way: str, seed: str, page_size: int) -> None:
    """Chunks, decodes and hits in one step, retractions, aborts, a flush, over a small pool."""
    rng = random.Random(seed)
    heads = [words(rng.randrange(999), rng.randrange(10, 40)) for _ in range(3)]
    names = []
    for i in range(16):
        prompt = rng.choice(heads) + words(i, rng.randrange(1, 20))
        names.append(rig.add(prompt, rng.randrange(1, 30)))
        for _ in range(rng.randrange(4)):
            set_way(rig, way, rng)
            rig.loop.step()
        if rng.random() < 0.2:
            rig.loop.abort(rng.choice(names))
        if i == 9:
            rig.loop.flush()
        if rng.random() < 0.15:
            rig.cache.evict(rng.randrange(80) // page_size)
    while rig.loop.step():
        set_way(rig, way, rng)


@pytest.mark.parametrize(
    ("ranks", "placement", "page_size", "way", "overlap", "kernels"), CASES, ids=str
)
def test_requests_that_come_and_go_read_replicas(
    tiny: Path,
    cold: Cold,
    *,
    ranks: int,
    placement: str,
    page_size: int,
    way: str,
    overlap: bool,
    kernels: str,
) -> None:
    with Rig(
        tiny,
        page_size=page_size,
        num_pages=240 // page_size,
        max_prefill_tokens=20,
        max_running=4,
        overlap=overlap,
        kernels=kernels,
        ranks=ranks,
        placement=placement,
        replicas=EAGER,
    ) as rig:
        journey(rig, way, f"{ranks} {placement} {page_size} {way}", page_size)
        stats = rig.cache.stats()
        assert stats.replicas.served_pages_total > 0
        assert sum(count for _, count in stats.replicas.dropped_pages_total) > 0
        check_replicas(rig)
        check_all(rig, cold)


@pytest.mark.parametrize("way", ["direct", "gather_kv"])
def test_chats_through_host_and_storage(tiny: Path, cold: Cold, tmp_path: Path, way: str) -> None:
    """Loads land in slots that replicas held a moment ago, and backups never copy a replica."""
    for engine in (2, 4):
        with Rig(
            tiny,
            page_size=4,
            num_pages=28,
            host_pages=120,
            ranks=engine,
            store=tmp_path,
            tiers=TierConfig(prefetch_policy="wait_complete"),
            remote=ways_of(way),
            replicas=EAGER,
        ) as rig:
            chat(rig, 50, 8)
            assert sum(answer.sources.host for answer in rig.answers.values()) > 0
            assert rig.cache.stats().replicas.made_pages_total > 0
            check_replicas(rig)
            check_all(rig, cold)


@pytest.mark.parametrize("way", ["direct", "gather_kv"])
def test_layers_without_a_window_read_replicas(windowed: Windowed, way: str) -> None:
    """Window state has none: it lies where its full page does."""
    path, cold = windowed("gemma3", 16)
    with Rig(
        path,
        page_size=4,
        num_pages=60,
        window_pages=2 * (least_window_pages(16, 4) + 2),
        host_pages=160,
        window_host_pages=80,
        ranks=2,
        remote=ways_of(way),
        replicas=EAGER,
    ) as rig:
        chat(rig, 50, 6)
        assert rig.cache.stats().replicas.served_pages_total > 0
        check_replicas(rig)
        check_all(rig, cold)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_latents_and_packed_pages_are_copied_as_they_are(
    models: Models, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """To the last bit where pages are packed: rounding would hide there what differs."""
    way, kernels = "gather_kv", "auto"
    if dtype == "int8":
        way, kernels = "direct", "reference"
        sum_row_by_row(monkeypatch)
    path = models("v2-lite")
    cold = Cold(path, kernels=kernels, kv_dtype=dtype)
    with Rig(
        path,
        page_size=4,
        num_pages=60,
        kv_dtype=dtype,
        kernels=kernels,
        ranks=2,
        remote=ways_of(way),
        replicas=EAGER,
    ) as rig:
        chat(rig, 30, 5)
        assert rig.cache.stats().replicas.served_pages_total > 0
        check_replicas(rig)
        if dtype == "int8":
            assert check_exact(rig, cold) > 0
        else:
            check_all(rig, cold)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_ranks_that_share_no_memory_read_replicas(tiny: Path, cold: Cold, tp: int) -> None:
    """As on several hosts: copies travel over the group, and no rank waits for a step's end. Of a
    row each rank copies what it holds."""
    with Rig(
        tiny,
        page_size=4,
        num_pages=64,
        max_prefill_tokens=20,
        max_running=4,
        ranks=2,
        tp=tp,
        apart=True,
        remote=ways_of("gather_kv"),
        replicas=EAGER,
    ) as rig:
        journey(rig, "gather_kv", "apart", 4)
        assert rig.cache.stats().replicas.served_pages_total > 0
        check_all(rig, cold)


@pytest.mark.parametrize(("kind", "way"), [("llama", "gather_kv"), ("v2-lite", "send_q")])
def test_rows_of_ranks_copy_what_each_holds(models: Models, kind: str, way: str) -> None:
    """Heads that are divided, of which each rank copies its own; latents, which each rank owns."""
    path = models(kind)
    with Rig(
        path,
        page_size=4,
        num_pages=64,
        max_prefill_tokens=20,
        max_running=4,
        tp=2,
        ranks=2,
        remote=ways_of(way),
        replicas=EAGER,
    ) as rig:
        journey(rig, way, kind, 4)
        assert rig.cache.stats().replicas.served_pages_total > 0
        check_replicas(rig)
        check_all(rig, Cold(path))


# Mutations.


def read_before_it_is_ready(patch: pytest.MonkeyPatch) -> None:
    """In the very step that makes it."""
    original = ReplicaLedger.plan

    def plan(self: ReplicaLedger, step: int) -> ReplicaPlan | None:
        found = original(self, step)
        return found and structs.replace(found, ready=found.made, ready_at=found.made_at)

    patch.setattr(ReplicaLedger, "plan", plan)


def outlives_its_page(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageReplicas, "leave", lambda self, pages: b"")


def nobody_is_told_of_the_end(patch: pytest.MonkeyPatch) -> None:
    original = ReplicaLedger.plan

    def plan(self: ReplicaLedger, step: int) -> ReplicaPlan | None:
        self._gone.clear()
        return original(self, step)

    patch.setattr(ReplicaLedger, "plan", plan)


def copied_to_each_others_places(patch: pytest.MonkeyPatch) -> None:
    original = NearestPages._exchange

    def exchange(self: NearestPages, pages: np.ndarray, copies: np.ndarray) -> Callable[[], None]:
        return original(self, pages, copies[::-1])

    patch.setattr(NearestPages, "_exchange", exchange)


def never_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NearestPages, "_copy", lambda self, pages, copies: None)


@pytest.mark.parametrize(
    ("mutate", "way"),
    [
        (read_before_it_is_ready, "gather_kv"),
        (outlives_its_page, "direct"),
        (nobody_is_told_of_the_end, "send_q"),
        (nobody_is_told_of_the_end, "direct"),
        (copied_to_each_others_places, "gather_kv"),
        (never_copied, "direct"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_broken_rule_is_noticed(
    tiny: Path,
    cold: Cold,
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
    way: str,
) -> None:
    """By logits against cold's alone: neither the replicas' bytes nor the invariants are asked."""
    cold.answer(words(1, 3), 1)  # the oracle is loaded before anything breaks
    rig = Rig(tiny, page_size=4, num_pages=120, max_prefill_tokens=20, ranks=2, replicas=EAGER)
    with monkeypatch.context() as patch:
        mutate(patch)
        try:
            journey(rig, way, "mutations", 4)
            stopped = rig.loop.dead
        except AssertionError as error:  # one of the engine's own: that is noticing, too
            stopped = str(error)
    if stopped is None:
        with pytest.raises(AssertionError):
            check_logits(rig, cold)
    rig.recorder.close()


def test_the_same_journeys_are_green_without_a_mutation(tiny: Path, cold: Cold) -> None:
    for way in ("direct", "gather_kv", "send_q"):
        with Rig(
            tiny, page_size=4, num_pages=120, max_prefill_tokens=20, ranks=2, replicas=EAGER
        ) as rig:
            journey(rig, way, "mutations", 4)
            check_all(rig, cold)
