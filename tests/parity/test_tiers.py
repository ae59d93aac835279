"""Journeys through host and storage give what no cache gives: tokens, logits, page bytes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from phloem.core.clock import MonotonicClock
from phloem.core.store import Verb
from phloem.stores import GuardPolicy, guarded
from phloem.stores.adapters.memory import MemoryBackend
from phloem.stores.faulty import Fault, FaultyBackend
from phloem.tiers import TierConfig
from tests.models.checkpoints import make_checkpoint
from tests.parity.rig import Cold, Rig, check_all
from tests.parity.test_journeys import words

POLICIES = ["write_through", "write_through_selective", "write_back"]


def chat(rig: Rig, seed: int, turns: int) -> list[int]:
    """A conversation, teacher-forced on nothing: each turn is the last prompt, answer and more.

    Between its turns another one passes through the cache, so that the device forgets.
    """
    cached = []
    history, other = words(seed, 6), words(seed + 1, 6)
    for turn in range(turns):
        answer = rig.ask(history, 3)
        cached.append(answer.cached)
        history = history + answer.tokens + words(seed + 100 + turn, 4)
        other = other + rig.ask(other, 2).tokens + words(seed + 200 + turn, 5)
    return cached


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_chat_of_twelve_turns_through_a_small_device_equals_cold(
    tiny: Path, cold: Cold, page_size: int, policy: str, overlap: bool
) -> None:
    """The device holds hardly more than one conversation; the host holds both."""
    pages = 120 // page_size
    with Rig(
        tiny,
        page_size=page_size,
        num_pages=pages,
        host_pages=4 * pages,
        overlap=overlap,
        tiers=TierConfig(write_policy=policy),
    ) as rig:
        cached = chat(rig, 50, 12)
        sources = [a.sources for a in rig.answers.values()]
        assert sum(s.host for s in sources) > 0
        if policy == "write_through":
            assert all(now > before for before, now in itertools.pairwise(cached))
        check_all(rig, cold)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_host_smaller_than_the_device_is_of_use(tiny: Path, cold: Cold, policy: str) -> None:
    with Rig(
        tiny, page_size=4, num_pages=30, host_pages=20, tiers=TierConfig(write_policy=policy)
    ) as rig:
        chat(rig, 60, 11)
        assert sum(a.sources.host for a in rig.answers.values()) > 0
        check_all(rig, cold)


@pytest.mark.parametrize("chunk_pages", [1, 3])
def test_loads_beside_chunked_prefill_and_decodes(tiny: Path, cold: Cold, chunk_pages: int) -> None:
    """Several conversations at once, some loaded, some computed, some decoding."""
    with Rig(
        tiny,
        page_size=4,
        num_pages=60,
        host_pages=240,
        max_prefill_tokens=max(16, 4 * chunk_pages),
        max_running=4,
    ) as rig:
        chats = [words(70 + i, 9 + 7 * i) for i in range(5)]
        for turn in range(4):
            ids = [rig.add(each, 5) for each in chats]
            rig.loop.run_until_idle()
            chats = [
                rig.answers[name].prompt + rig.answers[name].tokens + words(80 + 10 * turn + i, 5)
                for i, name in enumerate(ids)
            ]
        assert sum(a.sources.host for a in rig.answers.values()) > 0
        check_all(rig, cold)


def storage_tokens(rig: Rig) -> int:
    return sum(a.sources.storage for a in rig.answers.values())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_chat_goes_on_after_a_restart(
    tiny: Path, cold: Cold, tmp_path: Path, page_size: int, policy: str
) -> None:
    """Twelve turns over three engines on one directory; the first turn of each comes from it."""
    shape = {"num_pages": 240 // page_size, "host_pages": 480 // page_size}
    history: list[int] = words(40, 30)
    for engine in range(3):
        with Rig(
            tiny,
            page_size=page_size,
            **shape,
            store=tmp_path,
            tiers=TierConfig(write_policy=policy, prefetch_policy="wait_complete"),
        ) as rig:
            for turn in range(4):
                answer = rig.ask(history, 3)
                if turn == 0 and engine:
                    # Two pages fewer than all: the open page, and the last sampled token.
                    floor = 0 if policy == "write_through_selective" else len(history) - 8
                    assert answer.sources.storage >= floor - 2 * page_size
                history = history + answer.tokens + words(300 + 10 * engine + turn, 4)
            check_all(rig, cold)


def test_o24_after_an_orderly_shutdown_the_whole_prefix_is_there(
    tiny: Path, cold: Cold, tmp_path: Path
) -> None:
    """write_back: twenty prompts share a head that is never evicted while the leaves are."""
    head = words(90, 16)
    prompts = [head + words(91 + i, 9) for i in range(20)]
    config = TierConfig(write_policy="write_back", prefetch_policy="wait_complete")
    shape = {"page_size": 4, "num_pages": 40, "host_pages": 160, "tiers": config}
    with Rig(tiny, **shape, store=tmp_path) as rig:
        for prompt in prompts:
            rig.ask(prompt, 2)
    with Rig(tiny, **shape, store=tmp_path) as rig:
        cached = [rig.ask(prompt, 2).cached for prompt in prompts]
        assert sum(cached) >= 0.95 * 24 * len(prompts)  # six full pages each
        assert storage_tokens(rig) > 0
        check_all(rig, cold)


def test_what_a_full_store_has_evicted_is_there_again_after_a_restart(
    tiny: Path, cold: Cold
) -> None:
    """The store holds half of what passes through it. A chat that goes on meanwhile stays whole:
    its beginning, evicted long ago, is written again when it is used."""
    memory = MemoryBackend(60 * 6_144)  # a page of 4 tokens has 6 KiB
    config = TierConfig(prefetch_policy="wait_complete")
    shape = {"page_size": 4, "num_pages": 40, "host_pages": 400, "tiers": config}
    history = words(97, 40)
    with Rig(tiny, **shape, store=guarded(_Kept(memory), MonotonicClock())) as rig:
        for turn in range(8):
            rig.ask(words(500 + turn, 61), 1)
            history = history + rig.ask(history, 3).tokens + words(600 + turn, 4)
        assert memory.usage().evicted_objects > 60
        check_all(rig, cold)
    with Rig(tiny, **shape, store=guarded(_Kept(memory), MonotonicClock())) as rig:
        assert rig.ask(history, 3).sources.storage >= len(history) - 12
        check_all(rig, cold)


def test_o14_another_checkpoint_in_the_same_directory_reads_nothing_of_it(
    tiny: Path, cold: Cold, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    make_checkpoint("llama", other, seed=1)
    store = tmp_path / "store"
    config = TierConfig(prefetch_policy="wait_complete")
    shape = {"num_pages": 60, "host_pages": 120, "tiers": config, "store": store}
    prompt = words(95, 41)
    with Rig(tiny, page_size=4, **shape) as rig:
        rig.ask(prompt, 3)
    for path, page_size in ((other, 4), (tiny, 8)):
        with Rig(path, page_size=page_size, **shape) as rig:
            assert rig.ask(prompt, 3).cached == 0
            check_all(rig, Cold(path))
    with Rig(tiny, page_size=4, **shape) as rig:
        assert rig.ask(prompt, 3).sources.storage == 40
        check_all(rig, cold)


@pytest.mark.parametrize(
    "fault", [Fault.CORRUPT, Fault.HALF, Fault.DROP, Fault.ERROR], ids=lambda f: f.value
)
def test_o22_o23_what_storage_spoils_is_computed_again(
    tiny: Path, cold: Cold, fault: Fault
) -> None:
    """Said to be there by the probe, then lost or damaged on the way: recomputed, equal to cold."""
    memory = MemoryBackend(8 << 20)
    config = TierConfig(prefetch_policy="wait_complete")
    shape = {"page_size": 4, "num_pages": 60, "host_pages": 120, "tiers": config}
    prompt = words(96, 41)
    with Rig(tiny, **shape, store=guarded(_Kept(memory), MonotonicClock())) as rig:
        rig.ask(prompt, 3)
    backend = FaultyBackend(_Kept(memory))
    backend.script(Verb.GET, fault)
    store = guarded(backend, MonotonicClock(), policy=GuardPolicy(bad_key_s=0.0))
    with Rig(tiny, **shape, store=store) as rig:
        assert rig.ask(prompt, 3).cached < 40
        check_all(rig, cold)


class _Kept:
    """A backend that outlives the store over it."""

    def __init__(self, backend: MemoryBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def close(self) -> None:
        """The next engine reads it."""


def watch_waits(rig: Rig) -> list[tuple[float, bool]]:
    """From now on: how long a queued request had waited when it was looked at, and the answer."""
    tiers = rig.scheduler.tiers
    queued, may_start = tiers.queued, tiers.may_start
    since: dict[str, float] = {}
    looks: list[tuple[float, bool]] = []

    def note(request_id: str, match: object) -> None:
        queued(request_id, match)
        since[request_id] = rig.clock.now_s()

    def look(request_id: str) -> bool:
        waited_s = rig.clock.now_s() - since[request_id]
        looks.append((waited_s, may_start(request_id)))
        return looks[-1][1]

    tiers.queued, tiers.may_start = note, look
    return looks


@pytest.mark.parametrize("policy", ["auto", "timeout", "best_effort"])
def test_a_hung_backend_costs_a_bounded_wait_and_comes_back_by_itself(
    tiny: Path, cold: Cold, policy: str
) -> None:
    """Every call hangs, then the backend recovers: answers are cold's all the time.

    However slow the machine is: the first look at a request after its time is up lets it go on.
    """
    memory = MemoryBackend(8 << 20)
    config = TierConfig(prefetch_policy=policy, prefetch_timeout_s=0.05, storage_deadline_s=0.05)
    shape = {"page_size": 4, "num_pages": 60, "host_pages": 120, "tiers": config}
    prompts = [words(400 + i, 41) for i in range(6)]
    with Rig(tiny, **shape, store=guarded(_Kept(memory), MonotonicClock())) as rig:
        for prompt in prompts:
            rig.ask(prompt, 2)
    backend = FaultyBackend(_Kept(memory), rates={Fault.HANG: 1.0})
    patience = GuardPolicy(pause_s=0.02, longest_pause_s=0.05, probe_deadline_s=0.02)
    store = guarded(backend, MonotonicClock(), policy=patience)
    rig = Rig(tiny, **shape, store=store)
    looks = watch_waits(rig)
    for prompt in prompts:
        rig.ask(prompt, 2)
    limit_s = 0.0 if policy == "best_effort" else config.prefetch_timeout_s
    assert all(goes_on for waited_s, goes_on in looks if waited_s >= limit_s)
    assert len(looks) >= len(prompts)
    assert storage_tokens(rig) == 0
    backend.set_rates({})
    backend.release()
    end_s = rig.clock.now_s() + 60.0
    while not store.stats().healthy and rig.clock.now_s() < end_s:
        store.wait(0.01)
        rig.loop.step()
    assert store.stats().healthy
    rig.cache.evict(rig.cache.evictable_pages)
    rig.cache.leader.host.evict(rig.cache.leader.host.capacity)
    again = [rig.ask(prompt, 2) for prompt in prompts]
    if policy != "best_effort":
        assert sum(a.sources.storage for a in again) > 0
    check_all(rig, cold)
    backend.release()
    rig.__exit__()
