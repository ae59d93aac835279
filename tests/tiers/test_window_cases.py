"""Window state below the device: which tails are copied, stored and found, what is chosen."""

from __future__ import annotations

import random

import pytest

from phloem.cache import WindowConfig, check_invariants
from phloem.core.namespace import make_namespace
from phloem.core.tokens import tokens_to_bytes
from phloem.core.transfer import TransferKind
from phloem.sim import SimStorage
from phloem.tiers import WRITE_POLICIES, Forced, TierConfig
from phloem.tiers.keys import Links
from tests.sched.rig import Rig, key_facts, prompt_of

PAGE, WINDOW, TAIL = 4, 12, 3  # T = ceil(11 / 4)
WAIT = TierConfig(prefetch_policy="wait_complete")
UP = (TransferKind.BACKUP_HOST, TransferKind.BACKUP_STORAGE)


def make_rig(*, device: int = 60, host: int = 400, **changes) -> Rig:
    window = {"tokens": WINDOW, "layers": 2, "pages": (device,), "host_pages": host}
    window |= {
        name: changes.pop(name)
        for name in list(changes)
        if name in ("tokens", "layers", "checkpoint")
    }
    settings = {"page_size": PAGE, "num_pages": 60, "host_pages": 400, "tiers": WAIT}
    return Rig(window=WindowConfig(**window), **(settings | changes))


def ask(rig: Rig, name: str, prompt: list[int], max_tokens: int = 1):
    rig.add(name, prompt, max_tokens=max_tokens)
    rig.run()
    rig.check_answers()
    check_invariants(rig.cache, idle=True)
    return rig.last[name].cached


def push_out(rig: Rig, rng: random.Random, component: int | None = None) -> None:
    """Take what is cached off the device, all of it or a component."""
    if component != 1:
        rig.cache.evict(rig.cache.total_pages)
    rig.cache.evict_window(10_000)
    check_invariants(rig.cache, idle=True)


def moved(rig: Rig, kind: TransferKind, component: int = 1) -> int:
    return rig.transfers.num_bytes[kind, component]


@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_only_tails_cross_a_tier_border_whatever_the_policy(policy: str):
    """A prompt of 15 pages and its answer: a tail of 3 pages and, on a page's border, one more."""
    rng = random.Random(1)
    tiers = TierConfig(write_policy=policy, prefetch_policy="wait_complete")
    rig = make_rig(storage=SimStorage(), tiers=tiers)
    ask(rig, "first", prompt_of(rng, 15 * PAGE), max_tokens=1)
    assert rig.tiers.flush(60.0) == 0
    for kind in UP:
        assert moved(rig, kind) == TAIL + 1
    ask(rig, "second", prompt_of(rng, 15 * PAGE + 2), max_tokens=3 * PAGE)
    assert rig.tiers.flush(60.0) == 0
    both_ends = TAIL + TAIL  # that of the prompt, and that of the answer, three pages on
    for kind in UP:
        assert TAIL + 1 < moved(rig, kind) <= TAIL + 1 + both_ends
    assert dict(rig.loop.stats().tiers.dropped_pages_total) == {}
    rig.check_idle()


def test_a_session_moves_no_more_with_every_turn():
    """Ten turns with a host for four tails: those of the last two turns, and none before them."""
    rng = random.Random(2)
    rig = make_rig(num_pages=200, device=200, host=4 * TAIL)  # old tails leave the host
    history = prompt_of(rng, 30)
    for turn in range(10):
        before = moved(rig, TransferKind.BACKUP_HOST)
        ask(rig, f"turn {turn}", history, max_tokens=6)
        assert moved(rig, TransferKind.BACKUP_HOST) - before <= 3 * (TAIL + 1)
        history = history + rig.answers[f"turn {turn}"] + prompt_of(rng, 20)
    assert rig.cache.leader.window_host.evicted_pages > 0
    rig.check_idle()


@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_a_device_window_that_holds_one_request_loses_no_prefix(policy: str):
    """Window state leaves at once; full pages stay; the next turn loads one tail, no full page."""
    rng = random.Random(3)
    rig = make_rig(
        device=TAIL + 2, num_pages=200, host_pages=1000, tiers=TierConfig(write_policy=policy)
    )
    prompts = [prompt_of(rng, 10 * PAGE + 1) for _ in range(5)]
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            cached = ask(rig, f"{turn}/{number}", prompt)
            assert (cached.device, cached.host) == (0, 40 * (turn and number >= 0))
    assert moved(rig, TransferKind.LOAD_BACK) == 5 * TAIL
    assert moved(rig, TransferKind.LOAD_BACK, 0) == 0
    rig.check_idle()


def test_a_prefix_that_left_the_device_comes_back_with_its_tail_alone():
    rng = random.Random(4)
    rig = make_rig()
    prompt = prompt_of(rng, 10 * PAGE + 1)
    ask(rig, "first", prompt, max_tokens=2)
    push_out(rig, rng)
    cached = ask(rig, "again", prompt, max_tokens=5)
    assert (cached.device, cached.host) == (0, 40)
    assert moved(rig, TransferKind.LOAD_BACK, 0) == 10
    assert moved(rig, TransferKind.LOAD_BACK) == TAIL
    assert ask(rig, "third", prompt).device == 40
    rig.check_idle()


def test_both_transfers_of_a_load_are_named_by_the_step_that_reads_them():
    rng = random.Random(5)
    rig = make_rig()
    prompt = prompt_of(rng, 10 * PAGE + 1)
    ask(rig, "first", prompt)
    push_out(rig, rng)
    ask(rig, "again", prompt)
    loads = [t for t in rig.transfers.log if t.kind is TransferKind.LOAD_BACK]
    assert [t.component for t in loads] == [0, 1]
    named = [plan.loads for plan in rig.worker.plans if plan.loads]
    assert named[0] == tuple(t.id for t in loads)
    rig.check_idle()


@pytest.mark.parametrize("component", [0, 1])
def test_half_a_load_is_no_load(component: int):
    """One of the two transfers fails: the request is computed, and nothing of it is found wrong."""
    rng = random.Random(6)
    broken = {"on": True}
    rig = make_rig(
        transfers={
            "fails": lambda t: (
                broken["on"] and t.kind is TransferKind.LOAD_BACK and t.component == component
            )
        }
    )
    prompt = prompt_of(rng, 10 * PAGE + 1)
    ask(rig, "first", prompt)
    push_out(rig, rng)
    assert ask(rig, "again", prompt, max_tokens=6).total == 0
    stats = rig.loop.stats()
    assert stats.tiers.load_failures_total == 1
    broken["on"] = False
    push_out(rig, rng)
    assert ask(rig, "third", prompt).host == 40
    rig.check_idle()


def test_a_restarted_process_finds_the_tail_and_others_never_do():
    """Another window, another number of window layers, no window: other keys."""
    rng = random.Random(7)
    storage = SimStorage()
    prompt = prompt_of(rng, 10 * PAGE + 1)
    found = []
    for changes in ({}, {}, {"tokens": WINDOW + PAGE}, {"layers": 3}, {}):
        rig = make_rig(storage=storage, **changes)
        found.append(ask(rig, "r", prompt, max_tokens=2).storage)
        assert rig.tiers.flush(60.0) == 0
        rig.check_idle()
    plain = Rig(page_size=PAGE, num_pages=60, host_pages=400, tiers=WAIT, storage=storage)
    found.append(ask(plain, "r", prompt).storage)
    assert found == [0, 40, 0, 0, 40, 0]


def links_of(storage: SimStorage, *, window: bool) -> list[bytes]:
    return [link for link in storage.pages if link.endswith(SimStorage.WINDOW) == window]


def test_only_the_tail_of_the_longest_restorable_length_is_read():
    """Two turns are stored; the second one's tail has a hole: the first one's end is restored."""
    rng = random.Random(8)
    storage = SimStorage()
    prompt = prompt_of(rng, 8 * PAGE + 1)
    rig = make_rig(storage=storage)
    ask(rig, "first", prompt)
    longer = prompt + prompt_of(rng, 8 * PAGE)
    ask(rig, "second", longer)
    rig.check_idle()
    assert len(links_of(storage, window=False)) == 16
    assert len(links_of(storage, window=True)) == 2 * TAIL

    rig = make_rig(storage=storage)
    assert ask(rig, "again", longer).storage == 16 * PAGE
    assert moved(rig, TransferKind.PREFETCH) == TAIL
    assert moved(rig, TransferKind.PREFETCH, 0) == 16
    rig.check_idle()

    del storage.pages[links_of(storage, window=True)[-2]]
    rig = make_rig(storage=storage)
    assert ask(rig, "again", longer).storage == 8 * PAGE
    assert moved(rig, TransferKind.PREFETCH) == TAIL
    assert moved(rig, TransferKind.PREFETCH, 0) == 8  # full pages beyond would be of no use
    rig.check_idle()
    rig = make_rig(storage=storage)  # and what was missing has been written again
    assert ask(rig, "again", longer).storage == 16 * PAGE
    rig.check_idle()


@pytest.mark.parametrize("overflowed", [False, True])
def test_a_tail_that_storage_has_lost_is_written_again_when_it_is_used(overflowed: bool):
    """Told by its keys, or as one of more objects than could be told."""
    rng = random.Random(17)
    storage = SimStorage()
    rig = make_rig(storage=storage)
    prompt = prompt_of(rng, 10 * PAGE + 1)
    ask(rig, "first", prompt)
    lost = links_of(storage, window=True)
    for link in lost:
        del storage.pages[link]
    ask(rig, "unaware", prompt)
    assert links_of(storage, window=True) == []
    if overflowed:
        storage.overflow()
    else:
        storage.lose(lost)
    ask(rig, "other", prompt_of(rng, 3))
    assert links_of(storage, window=True) == []  # not before it is used
    ask(rig, "again", prompt)
    assert links_of(storage, window=True) == lost
    rig.check_idle()


def test_a_full_page_lost_in_storage_ends_what_can_be_restored_there():
    rng = random.Random(9)
    storage = SimStorage()
    prompt = prompt_of(rng, 8 * PAGE + 1)
    longer = prompt + prompt_of(rng, 8 * PAGE)
    rig = make_rig(storage=storage)
    ask(rig, "first", prompt)
    ask(rig, "second", longer)
    rig.check_idle()
    del storage.pages[links_of(storage, window=False)[12]]
    rig = make_rig(storage=storage)
    assert ask(rig, "again", longer).storage == 8 * PAGE
    rig.check_idle()


def test_a_tail_that_left_device_and_host_comes_from_storage_alone():
    """Full pages are on the device: storage is asked for window state, and only that is read."""
    rng = random.Random(10)
    storage = SimStorage()
    rig = make_rig(storage=storage, host=TAIL + 1)
    prompt = prompt_of(rng, 10 * PAGE + 1)
    ask(rig, "first", prompt)
    push_out(rig, rng, component=1)
    rig.cache.leader.window_host.evict(100)
    before = moved(rig, TransferKind.PREFETCH, 0)
    cached = ask(rig, "again", prompt)
    assert cached.total == 40
    assert moved(rig, TransferKind.PREFETCH) == TAIL
    assert moved(rig, TransferKind.PREFETCH, 0) == before
    rig.check_idle()


def test_the_sets_of_restorable_lengths_are_told_tier_by_tier():
    rng = random.Random(11)
    storage = SimStorage()
    prompt = prompt_of(rng, 8 * PAGE + 1)
    longer = prompt + prompt_of(rng, 8 * PAGE)
    rig = make_rig(storage=storage, max_running=1)
    ask(rig, "first", prompt)
    ask(rig, "second", longer)
    request = rig.requests["second"]
    push_out(rig, rng, component=1)
    match = rig.cache.match(request.namespace, request.tokens)
    lengths = rig.tiers.restorable_lengths(match)
    assert lengths.device == (0,)
    assert lengths.host == (0, 8, 16)
    assert lengths.storage == ()
    rig.check_idle()

    rig = make_rig(storage=storage, max_running=1)
    rig.add("running", prompt_of(rng, 30), max_tokens=60)
    rig.step(3)
    rig.add("waits", longer, max_tokens=1)
    told = ()
    while not told:
        rig.step()
        match = rig.cache.match(request.namespace, request.tokens)
        told = rig.tiers.restorable_lengths(match, "waits").storage
    assert told == (8, 16)
    rig.run()
    rig.check_idle()


@pytest.mark.parametrize(
    ("forced", "host", "computed"), [(Forced.LOAD, 40, 0), (Forced.RECOMPUTE, 0, None)]
)
def test_the_cost_model_chooses_between_load_and_restart(forced, host, computed):
    """Full pages on the device, the tail on the host: one tail to load, or a restart lower down."""
    rng = random.Random(12)
    rig = make_rig()
    prompt = prompt_of(rng, 10 * PAGE + 1)
    ask(rig, "first", prompt)
    push_out(rig, rng, component=1)
    rig.tiers.cost.forced = forced
    cached = ask(rig, "again", prompt)
    assert cached.host == host
    if forced is Forced.RECOMPUTE:  # 10 pages less a tail of 3, less W - 1 = 11 for one layer more
        assert cached.device == (10 - TAIL) * PAGE - 12
        assert dict(rig.loop.stats().tiers.load_choices_total)["recompute"] == 1
    rig.check_idle()


def test_where_loads_are_slow_and_computing_is_fast_it_restarts_by_itself():
    rng = random.Random(13)
    rig = make_rig()
    prompt = prompt_of(rng, 10 * PAGE + 1)
    ask(rig, "first", prompt)
    push_out(rig, rng, component=1)
    for pages in range(1, 40):
        rig.tiers.cost.observe_transfer(TransferKind.LOAD_BACK, pages, 10.0 * pages)
        rig.tiers.cost.observe_prefill(100 * pages, 1e-6 * pages)
    assert ask(rig, "again", prompt).host == 0
    assert moved(rig, TransferKind.LOAD_BACK) == 0
    rig.check_idle()


def test_copies_that_fail_or_find_no_room_are_counted():
    rng = random.Random(14)
    rig = make_rig(
        transfers={"fails": lambda t: t.kind is TransferKind.BACKUP_HOST and t.component == 1}
    )
    ask(rig, "first", prompt_of(rng, 41))
    assert dict(rig.loop.stats().tiers.dropped_pages_total) == {"window_copy_failed": TAIL}
    rig.check_idle()
    rig = make_rig(host=TAIL - 1)
    ask(rig, "first", prompt_of(rng, 41))
    assert dict(rig.loop.stats().tiers.dropped_pages_total) == {"window_host_full": 1}
    rig.check_idle()


def test_a_store_that_takes_nothing_is_given_up_by_paths_of_several_transfers(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of 130 window pages one transfer's worth is tried eight times, then all are counted: else the
    engine would write for ever."""
    rng = random.Random(19)
    rig = make_rig(
        tokens=130 * PAGE, num_pages=400, device=400, host=600, host_pages=800, storage=SimStorage()
    )
    copy = rig.transfers._copy

    def dead(transfer, index: int) -> bool:
        if transfer.kind is TransferKind.BACKUP_STORAGE and transfer.component:
            return False
        return copy(transfer, index)

    monkeypatch.setattr(rig.transfers, "_copy", dead)
    rig.add("long", prompt_of(rng, 140 * PAGE + 1), max_tokens=1)
    for _ in range(1000):
        if not rig.step():
            break
    assert not rig.tiers.busy
    kinds = [(t.kind, t.component) for t in rig.transfers.log]
    assert kinds.count((TransferKind.BACKUP_STORAGE, 1)) == 8
    assert dict(rig.loop.stats().tiers.dropped_pages_total)["window_storage_failed"] == 130
    rig.check_idle()


def test_a_tail_of_several_transfers_is_stored_whole_and_comes_back():
    rng = random.Random(20)
    storage = SimStorage()
    prompt = prompt_of(rng, 140 * PAGE + 1)
    shape = {"num_pages": 400, "device": 400, "host": 600, "host_pages": 800}
    for life in range(2):
        rig = make_rig(tokens=130 * PAGE, storage=storage, **shape)
        assert ask(rig, "r", prompt).storage == 140 * PAGE * life
        assert len(links_of(storage, window=True)) == 130
        rig.check_idle()


def test_remembered_links_are_those_that_would_be_made():
    """Beginnings, other prompts and other tenants, over and over, against links made anew."""
    rng = random.Random(18)
    prompts = [tokens_to_bytes(prompt_of(rng, 40)) for _ in range(6)]
    spaces = [make_namespace(model="m", salt=salt) for salt in ("a", "b")]
    links = Links(key_facts(PAGE, 1), PAGE)
    for _ in range(300):
        space, prompt = rng.choice(spaces), rng.choice(prompts)
        tokens = prompt[: 4 * rng.randrange(41)]
        assert links.of(space, tokens) == Links(key_facts(PAGE, 1), PAGE).of(space, tokens)
        links.of(space, prompt).clear()  # what was given away is not what is remembered


def test_a_window_of_one_token_needs_no_state_of_the_past():
    rng = random.Random(15)
    storage = SimStorage()
    prompt = prompt_of(rng, 41)
    for life in range(2):
        rig = make_rig(tokens=1, storage=storage)
        assert ask(rig, "r", prompt).storage == 40 * life
        assert [moved(rig, kind) for kind in TransferKind] == [0] * len(TransferKind)
        rig.check_idle()


def test_checkpoints_are_stored_and_found_by_who_branches_off_between_ends():
    """A prompt of 30 pages with a tail kept every 8; another one leaves it after 20."""
    rng = random.Random(16)
    storage = SimStorage()
    prompt = prompt_of(rng, 30 * PAGE + 1)
    rig = make_rig(storage=storage, checkpoint=8, num_pages=100)
    ask(rig, "first", prompt)
    rig.check_idle()
    rig = make_rig(storage=storage, checkpoint=8, num_pages=100)
    cached = ask(rig, "branch", prompt[: 20 * PAGE] + prompt_of(rng, 30))
    assert cached.storage == 16 * PAGE
    rig.check_idle()
