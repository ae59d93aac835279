"""Cases O-01, O-02 and O-16 ... O-24 on the whole engine without weights.

Every answer is compared with cold's, page memory remembers what was written where, and freed pages
are poisoned: a page that was copied too early, reused too early or mixed up changes an answer.
"""

from __future__ import annotations

import random

import pytest

from phloem.cache import check_invariants
from phloem.core.transfer import TransferKind
from phloem.sim import SimStorage
from phloem.tiers import TierConfig
from tests.sched.rig import Rig, prompt_of

WAIT = TierConfig(prefetch_policy="wait_complete")


def ask(rig: Rig, name: str, prompt: list[int], max_tokens: int = 1):
    """One request, to its end and the end of all transfers."""
    rig.add(name, prompt, max_tokens=max_tokens)
    rig.run()
    rig.check_answers()
    check_invariants(rig.cache, idle=True)
    return rig.last[name].cached


def push_out(rig: Rig, rng: random.Random) -> None:
    """Other requests take all of the device."""
    for number in range(4):
        prompt = prompt_of(rng, rig.cache.total_pages * rig.page_size // 2)
        ask(rig, f"other {number} {rng.random()}", prompt)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("where", ["host", "storage"])
def test_o01_a_whole_prompt_cached_below_the_device(page_size: int, where: str):
    """Lengths around page borders: the last token is always computed, whatever the tier."""
    p = page_size
    rng = random.Random(p)
    storage = SimStorage()

    def start() -> Rig:
        return Rig(page_size=p, num_pages=30, host_pages=400, storage=storage, tiers=WAIT)

    rig = start()
    for length in sorted({max(1, p - 1), p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 5 * p}):
        prompt = prompt_of(rng, length)
        rig.add(f"a{length}", prompt, max_tokens=3 * p)
        rig.run()
        if where == "host":
            push_out(rig, rng)
        else:
            assert rig.tiers.flush(60.0) == 0
            rig.check_idle()
            rig = start()
        floor = (length - 1) // p * p
        again = ask(rig, f"b{length}", prompt, max_tokens=3 * p)
        # One page is not worth asking storage for.
        assert again.total == floor or (where == "storage" and floor <= p)
        assert again.device == 0 or where == "host"
        assert ask(rig, f"c{length}", prompt, max_tokens=3 * p).total == floor
        follow_up = prompt + rig.answers[f"b{length}"] + prompt_of(rng, 3)
        expected = (length + 3 * p - 1) // p * p
        assert ask(rig, f"d{length}", follow_up).total == expected
    rig.check_idle()


def test_o02_a_host_hit_beyond_a_device_hit_leaves_the_device_pages_alone():
    """Device holds 3 pages of 6, the host all of them; the tail is another one."""
    rng = random.Random(2)
    rig = Rig(page_size=4, num_pages=40, host_pages=400)
    prompt = prompt_of(rng, 6 * 4 + 3)
    ask(rig, "first", prompt)
    ask(rig, "head", prompt[: 3 * 4] + prompt_of(rng, 40))  # the first 3 pages are used last
    rig.cache.evict(3 + 10)
    match = rig.cache.match(rig.requests["first"].namespace, rig.requests["first"].tokens)
    assert (match.num_pages, match.host_pages) == (3, 3)
    before = rig.worker.memory[0, match.refs()].copy()
    refs = match.refs().tolist()
    cached = ask(rig, "again", prompt[: 6 * 4] + prompt_of(rng, 2 * 4 + 1))
    assert (cached.device, cached.host) == (12, 12)
    assert (rig.worker.memory[0, refs] == before).all()
    rig.check_idle()


def test_o18_pages_are_copied_only_after_they_were_computed():
    """A backup is submitted when the step that computed its pages has been collected, not before.

    (Its bytes are compared by every later hit: page memory holds ids and positions.)
    """
    rng = random.Random(3)
    rig = Rig(page_size=4, num_pages=40, host_pages=400, max_prefill_tokens=8)
    rig.add("long", prompt_of(rng, 60), max_tokens=30)
    while rig.step():
        computed = {ref for node in rig.cache.state.tree.nodes.values() for ref in node.ref_list()}
        for transfer in rig.transfers.log:
            if transfer.kind is TransferKind.BACKUP_HOST:
                assert set(transfer.device.tolist()) <= computed
                assert (rig.worker.memory[0, transfer.device] >= 0).all()
    rig.check_idle()


@pytest.mark.parametrize("overlap", [True, False])
def test_o19_the_source_of_a_load_is_protected_until_it_has_ended(overlap: bool):
    """Host evictions while 6 pages are loaded from a host that is full."""
    rng = random.Random(4)
    held = {"on": False}
    rig = Rig(
        page_size=4,
        num_pages=24,
        host_pages=100,
        overlap=overlap,
        transfers={"blocked": lambda t: held["on"] and t.kind is TransferKind.LOAD_BACK},
    )
    prompt = prompt_of(rng, 25)
    ask(rig, "first", prompt)
    push_out(rig, rng)
    held["on"] = True
    rig.add("again", prompt, max_tokens=8)
    host = rig.cache.leader.host
    rig.step()
    load = next(t for t in rig.transfers.log if t.kind is TransferKind.LOAD_BACK)
    while host.evict(100):
        pass
    slots = set(load.host.tolist())
    assert all(rig.cache.state.host.is_used(slot) for slot in slots)
    taken = host.allocate(rig.cache.state.host.num_free)
    assert taken is not None
    assert not slots & set(memoryview(taken).cast("q").tolist())
    host.free(taken)
    held["on"] = False
    rig.run()
    assert rig.last["again"].cached.host == 24
    rig.check_idle()


def test_a_load_waits_for_the_step_that_may_still_use_its_pages(monkeypatch: pytest.MonkeyPatch):
    """Its destination may belong to a wasted row of the step in flight."""
    rng = random.Random(14)
    rig = Rig(page_size=4, num_pages=40, host_pages=400, max_running=4)
    prompt = prompt_of(rng, 41)
    ask(rig, "first", prompt)
    push_out(rig, rng)
    rig.add("running", prompt_of(rng, 9), max_tokens=30)
    rig.step(4)
    seen = []
    submit = rig.transfers.submit

    def watched(transfer):
        if transfer.kind is TransferKind.LOAD_BACK:
            seen.append((transfer.after_step, rig.worker.plans[-1].step))
        submit(transfer)

    monkeypatch.setattr(rig.transfers, "submit", watched)
    rig.add("again", prompt, max_tokens=3)
    rig.run()
    assert len(seen) == 1
    assert seen[0][0] == seen[0][1]
    rig.check_idle()


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_o20_a_backup_that_fails_or_finds_no_room_is_no_backup(write_policy: str):
    """The device makes room all the same, the page is computed again, and drops are counted."""
    rng = random.Random(5)
    rig = Rig(
        page_size=4,
        num_pages=16,
        host_pages=80,
        tiers=TierConfig(write_policy=write_policy),
        transfers={"fails": lambda t: t.kind is TransferKind.BACKUP_HOST},
    )
    prompt = prompt_of(rng, 41)
    ask(rig, "first", prompt)
    push_out(rig, rng)
    assert rig.cache.state.tree.host_pages == 0
    assert ask(rig, "again", prompt).total == 0
    stats = rig.loop.stats()
    assert dict(stats.tiers.dropped_pages_total)["copy_failed"] > 0
    assert stats.cache.unbacked_pages_total == stats.cache.evicted_pages_total > 0
    rig.check_idle()


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_o20_a_host_full_of_slots_in_use_hangs_nothing(write_policy: str):
    rng = random.Random(6)
    rig = Rig(page_size=4, num_pages=16, host_pages=64, tiers=TierConfig(write_policy=write_policy))
    taken = rig.cache.leader.host.allocate(64)
    assert taken is not None
    prompt = prompt_of(rng, 41)
    rig.add("first", prompt, max_tokens=1)
    rig.run()
    for number in range(4):
        rig.add(f"other{number}", prompt_of(rng, 33), max_tokens=2)
    rig.run()
    rig.check_answers()
    assert dict(rig.loop.stats().tiers.dropped_pages_total)["host_full"] > 0
    rig.cache.leader.host.free(taken)
    rig.run()
    assert ask(rig, "again", prompt).host == 0
    rig.check_idle()


@pytest.mark.parametrize("policy", ["timeout", "best_effort"])
def test_o21_a_thousand_prefetches_cut_short_or_flushed_leak_no_host_page(policy: str):
    rng = random.Random(7)
    storage = SimStorage()
    prompts = [prompt_of(rng, 33) for _ in range(4)]
    writer = Rig(page_size=4, num_pages=60, host_pages=300, storage=storage)
    for number, prompt in enumerate(prompts):
        ask(writer, str(number), prompt)
    rig = Rig(
        page_size=4,
        num_pages=60,
        host_pages=60,
        storage=storage,
        tiers=TierConfig(prefetch_policy=policy, prefetch_timeout_s=0.0005),
        transfers={"blocked": lambda t: rng.random() < 0.5},
    )
    for number in range(1000):
        rig.add(f"r{number}", prompts[number % 4], max_tokens=1)
        rig.step(rng.randrange(4))
        if number % 3 == 0:
            rig.loop.flush()
        if number % 5 == 0:
            rig.loop.abort(f"r{number}")
        if number % 50 == 0:
            check_invariants(rig.cache)
    rig.run()
    assert rig.tiers._prefetches._pages_in_flight == 0
    assert not rig.tiers._prefetches._by_request
    rig.check_idle()
    assert rig.cache.state.host.num_free == 60


def test_o22_host_pages_that_are_gone_when_the_request_starts_are_computed():
    """Evicted between the match in the queue and admission: the match is made again."""
    rng = random.Random(8)
    rig = Rig(page_size=4, num_pages=24, host_pages=200, max_running=1, policy="lpm")
    prompt = prompt_of(rng, 41)
    ask(rig, "first", prompt)
    push_out(rig, rng)
    rig.add("running", prompt_of(rng, 20), max_tokens=20)
    rig.step()
    rig.add("again", prompt, max_tokens=1)  # matched now, admitted later
    while rig.cache.leader.host.evict(1000):
        pass
    rig.run()
    assert rig.last["again"].cached.host == 0
    rig.check_idle()


def test_o22_a_load_that_fails_in_the_middle_is_computed_instead():
    """Never an assertion; the request starts again, and its sources still sum to its prompt."""
    rng = random.Random(9)
    rig = Rig(
        page_size=4,
        num_pages=24,
        host_pages=200,
        transfers={"fails": lambda t: t.kind is TransferKind.LOAD_BACK},
    )
    prompt = prompt_of(rng, 41)
    ask(rig, "first", prompt)
    push_out(rig, rng)
    cached = ask(rig, "again", prompt, max_tokens=6)
    assert cached.total == 0
    stats = rig.loop.stats()
    assert stats.tiers.load_failures_total == 1
    assert stats.retractions_total == 0
    sources = stats.cached_tokens_total.total + stats.computed_tokens_total
    assert sources == stats.prompt_tokens_total
    rig.check_idle()


def test_o23_a_page_lost_in_the_middle_of_a_prefix_ends_it_there():
    """Pages before the gap are used, the rest is computed and written again."""
    rng = random.Random(10)
    storage = SimStorage()
    prompt = prompt_of(rng, 41)
    for life in range(3):
        rig = Rig(page_size=4, num_pages=40, host_pages=400, storage=storage, tiers=WAIT)
        cached = ask(rig, "r", prompt)
        assert cached.storage == (0, 24, 40)[life]
        assert rig.tiers.flush(60.0) == 0
        rig.check_idle()
        if life == 0:
            del storage.pages[list(storage.pages)[6]]


def test_o24_leaves_do_not_reach_storage_without_their_head():
    """write_back, 20 prompts with one head, orderly shutdown: after a restart 95 % of pages hit."""
    rng = random.Random(11)
    storage = SimStorage()
    head = prompt_of(rng, 16)
    prompts = [head + prompt_of(rng, 33) for _ in range(20)]
    tiers = TierConfig(write_policy="write_back", prefetch_policy="wait_complete")
    found = []
    for _ in range(2):
        rig = Rig(page_size=4, num_pages=60, host_pages=600, storage=storage, tiers=tiers)
        found = [ask(rig, str(i), prompt).total // 4 for i, prompt in enumerate(prompts)]
        assert rig.tiers.flush(60.0) == 0
        rig.check_idle()
    assert sum(found) >= 0.95 * 20 * 12


@pytest.mark.parametrize("host_pages", [20, 400])
def test_write_through_has_stored_everything_before_the_process_dies(host_pages: int):
    """No orderly shutdown: also with a host that keeps no copies of what the device holds."""
    rng = random.Random(15)
    storage = SimStorage()
    rig = Rig(page_size=4, num_pages=100, host_pages=host_pages, storage=storage, tiers=WAIT)
    prompts = [prompt_of(rng, 33) for _ in range(6)]
    for number, prompt in enumerate(prompts):
        ask(rig, str(number), prompt)
    assert len(storage.pages) == 6 * 8
    assert dict(rig.loop.stats().tiers.dropped_pages_total) == {}
    after = Rig(page_size=4, num_pages=100, host_pages=host_pages, storage=storage, tiers=WAIT)
    assert ask(after, "again", prompts[0]).storage == 32
    after.check_idle()


def copied_pages(rig: Rig) -> int:
    kinds = {one.kind: one.pages_total for one in rig.loop.stats().tiers.transfers}
    return kinds[TransferKind.BACKUP_HOST.value]


def test_a_host_that_passes_pages_on_copies_each_once():
    """However often a path is used again: it is in storage, and needs no copy on the way there."""
    rng = random.Random(25)
    storage = SimStorage()
    rig = Rig(page_size=4, num_pages=100, host_pages=20, storage=storage, tiers=WAIT)
    prompt = prompt_of(rng, 32)
    for number in range(5):
        ask(rig, str(number), prompt + prompt_of(rng, 9))
    assert len(storage.pages) == 8 + 5 * 2
    assert copied_pages(rig) == 8 + 5 * 2
    rig.check_idle()


@pytest.mark.parametrize("host_pages", [20, 300])
def test_what_storage_has_leaves_without_a_copy_if_the_host_is_but_a_stage(host_pages: int):
    """A host of more pages than the device keeps what leaves the device: that is nearer."""
    rng = random.Random(26)
    storage = SimStorage()
    rig = Rig(page_size=4, num_pages=100, host_pages=host_pages, storage=storage, tiers=WAIT)
    prompt = prompt_of(rng, 33)
    ask(rig, "first", prompt)
    push_out(rig, rng)
    again = ask(rig, "again", prompt)
    if host_pages < 100:
        assert again.storage == 32
        assert copied_pages(rig) <= len(storage.pages)
    else:
        assert again.host == 32
        assert copied_pages(rig) > len(storage.pages)
    rig.check_idle()


def test_o15_keys_do_not_depend_on_the_process_that_made_them():
    """Another generation of the same weights, in another process, finds what was stored."""
    from phloem.core.namespace import make_namespace
    from phloem.tiers.keys import Links
    from tests.sched.rig import key_facts

    tokens = bytes(range(64))
    links = [
        Links(key_facts(4, 1), 4).of(make_namespace(model="m", generation=n, salt=salt), tokens)
        for n, salt in ((0, "a"), (7, "a"), (0, "b"))
    ]
    assert links[0] == links[1]
    assert not set(links[0]) & set(links[2])


def test_a_dead_backend_costs_no_more_than_the_deadline_and_comes_back():
    """Nothing is ever answered until the deadline: requests go on; later storage serves again."""
    rng = random.Random(12)
    storage = SimStorage()
    prompt = prompt_of(rng, 41)
    writer = Rig(page_size=4, num_pages=40, host_pages=400, storage=storage)
    ask(writer, "r", prompt)
    dead = {"on": True}
    storage_kinds = (TransferKind.PROBE, TransferKind.PREFETCH, TransferKind.BACKUP_STORAGE)
    rig = Rig(
        page_size=4,
        num_pages=40,
        host_pages=400,
        storage=storage,
        tiers=TierConfig(prefetch_policy="auto", prefetch_timeout_s=0.5),
        transfers={"blocked": lambda t: dead["on"] and t.kind in storage_kinds},
    )
    start_s = rig.clock.now_s()
    rig.add("while dead", prompt, max_tokens=3)
    while "while dead" not in rig.last:
        rig.step()
    assert rig.clock.now_s() - start_s < 0.6
    assert rig.last["while dead"].cached.total == 0
    dead["on"] = False
    rig.run()
    rig.loop.flush()
    assert ask(rig, "alive", prompt).storage == 40
    rig.check_idle()
