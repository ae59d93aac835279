"""Copies of a page on several tiers: each is what was computed once, to the bit; no journey mixes.

Two steps may compute the same page in differently shaped matrix products, which round differently
(an answer's pages token by token, and the same tokens again as a part of the next prompt). A page
that is computed again while the host has it lies there in two versions: both are right, as right as
any other chunking, and neither is written over by the other.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from phloem.core.clock import MonotonicClock
from phloem.core.store import Caps, Verb
from phloem.core.tokens import tokens_to_bytes
from phloem.core.transfer import Transfer, TransferKind
from phloem.replica import HostPool
from phloem.stores import guarded
from phloem.stores.adapters.memory import MemoryBackend
from phloem.stores.faulty import Fault, FaultyBackend
from phloem.tiers import Forced, TierConfig
from phloem.transfer import TransferHooks
from tests.parity.rig import NAMESPACE, Cold, Rig, check_all, check_pages
from tests.parity.test_journeys import words

P = 4


def test_a_page_computed_again_leaves_the_copy_on_the_host_as_it_is(tiny: Path, cold: Cold) -> None:
    """An answer is computed token by token and copied, then as a part of the next prompt."""
    with Rig(tiny, page_size=P, num_pages=40, host_pages=200) as rig:
        question = words(1, 5)
        prompt = question + rig.ask(question, 8 * P).tokens
        before = host_pages(rig, prompt)
        assert len(before) == 9
        rig.cache.evict(40)
        rig.scheduler.tiers.cost.forced = Forced.RECOMPUTE
        assert rig.ask(prompt, 1).cached == 0
        match = rig.cache.match(NAMESPACE, tokens_to_bytes(prompt))
        assert match.num_pages == 9
        assert host_pages(rig, prompt) == before
        check_all(rig, cold)


def host_pages(rig: Rig, prompt: list[int]) -> list[bytes]:
    """The bytes of the prompt's pages on the host, in order."""
    node, _, _ = rig.cache.state.tree.find(NAMESPACE, tokens_to_bytes(prompt), 9 * P * 4)
    parts = []
    while node.parent is not None:
        parts[:0] = [rig.loaded.hosts[0].read_page(slot) for slot in node.host_list()]
        node = node.parent
    return parts


class Holder:
    """Holds the copy thread before some chunks: the seed says how late each of them is."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._never = threading.Event()

    def __call__(self, transfer: Transfer, position: int) -> None:
        self._never.wait(self._rng.choice((0.0, 0.0, 0.001, 0.004)))


def stress(tiny: Path, seed: int) -> Rig:
    """Chats through a device, a host and a slow store that are too small, several at once.

    Answers are computed token by token and, where they are not loaded, again as a part of the next
    prompt; which way is taken is drawn.
    """
    rng = random.Random(f"copies/{seed}")
    slow = FaultyBackend(MemoryBackend(1 << 20), seed=seed, rates={Fault.DELAY: 0.5}, delay_s=0.02)
    rig = Rig(
        tiny,
        page_size=P,
        num_pages=rng.choice((26, 40)),
        host_pages=rng.choice((16, 30, 170)),
        max_prefill_tokens=rng.choice((4 * P, 200)),
        max_running=rng.choice((2, 4)),
        tiers=TierConfig(
            write_policy=rng.choice(("write_back", "write_through")),
            prefetch_policy="wait_complete",
        ),
        store=guarded(slow, MonotonicClock()),
        transfer_hooks=TransferHooks(before_chunk=Holder(seed), whole_layers=True),
    )
    chats = [words(10 * seed + i, rng.randrange(8, 20)) for i in range(6)]
    for _ in range(5):
        ids = []
        for chat in rng.sample(chats, len(chats)):
            rig.scheduler.tiers.cost.forced = rng.choice((None, Forced.LOAD, Forced.RECOMPUTE))
            ids.append((chats.index(chat), rig.add(chat, rng.randrange(2, 9))))
            for _ in range(rng.randrange(1, 6)):
                rig.loop.step()
            rig.cache.evict(rng.randrange(12))
            rig.cache.leader.host.evict(rng.randrange(12))
        rig.loop.run_until_idle()
        for which, name in ids:
            chats[which] = chats[which] + rig.answers[name].tokens + words(len(name), 3)
    rig.cache.evict(40)
    rig.cache.leader.host.evict(170)
    for chat in chats:  # what storage has is looked at as well
        rig.ask(chat, 1)
    return rig


@pytest.mark.parametrize("seed", range(6))
def test_no_race_makes_bytes_that_nobody_computed(tiny: Path, cold: Cold, seed: int) -> None:
    rig = stress(tiny, seed)
    with rig:
        check_all(rig, cold)


class Unsealed(FaultyBackend):
    """No checksum stands in for the audit."""

    @property
    def caps(self) -> Caps:
        return replace(super().caps, verifies=True)


def reuse_slots_of_a_hung_write(tiny: Path, cold: Cold) -> None:
    """Pages leave device and host while they are being written to storage, and others take every
    place on the host that they may have; then the write goes on. What storage has is read back."""
    backend = Unsealed(MemoryBackend(1 << 20))
    shape = {"page_size": P, "num_pages": 12, "host_pages": 16}
    config = TierConfig(prefetch_policy="wait_complete", storage_deadline_s=60.0)
    prompt = words(1, 8 * P + 1)
    rig = Rig(tiny, **shape, tiers=config, store=guarded(backend, MonotonicClock()))
    tiers, transfers = rig.scheduler.tiers, rig.scheduler.tiers._flights
    backend.script(Verb.PUT, Fault.HANG)
    rig.add(prompt, 1)
    run_until(rig, lambda: transfers.count[TransferKind.BACKUP_STORAGE] == 1)
    run_until(rig, lambda: not rig.scheduler.num_unfinished)
    rig.cache.evict(12)
    rig.cache.leader.host.evict(16)
    for other in (2, 3):
        rig.cache.evict(12)
        name = rig.add(words(other, 8 * P + 1), 1)
        run_until(rig, lambda name=name: rig.answers[name].finish is not None)
        run_until(rig, lambda: not tiers._backups.num_queued and not tiers.frees_pages)
    backend.release()
    rig.loop.run_until_idle()
    rig.cache.evict(12)
    rig.cache.leader.host.evict(16)
    assert rig.ask(prompt, 1).sources.storage > 0
    try:
        check_pages(rig, cold)
    finally:
        rig.recorder.close()
        rig.loaded.transfers.close()


def run_until(rig: Rig, done: Callable[[], bool]) -> None:
    end_s = rig.clock.now_s() + 60.0
    while not done():
        assert rig.clock.now_s() < end_s, "it does not happen"
        if not rig.loop.step():
            rig.scheduler.tiers.wait(0.001)


def test_a_slot_is_not_used_again_while_it_is_being_written_to_storage(
    tiny: Path, cold: Cold
) -> None:
    reuse_slots_of_a_hung_write(tiny, cold)


def test_bytes_that_nobody_computed_would_be_seen(
    tiny: Path, cold: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds that hold nothing: the audit must go red."""
    cold.answer(words(1, 3), 1)  # the oracle is loaded before anything breaks
    with monkeypatch.context() as patch:
        patch.setattr(HostPool, "hold", lambda self, slots: None)
        patch.setattr(HostPool, "release", lambda self, slots: None)
        with pytest.raises(AssertionError, match=r"is wrong|nobody computed"):
            reuse_slots_of_a_hung_write(tiny, cold)
