"""What storage loses by its own eviction is known to be lost, and written again when it is used."""

from __future__ import annotations

import random

import pytest

from phloem.cache import check_invariants
from phloem.core.tokens import tokens_to_bytes
from phloem.core.transfer import Transfer, TransferKind
from phloem.sim import SimStorage, TransferCosts
from phloem.tiers import TierConfig
from phloem.tiers import writes as writes_module
from phloem.tiers.writes import path_tokens
from tests.sched.rig import NAMESPACE, Rig, prompt_of
from tests.sched.test_host_tier import walk

P = 4
PAGES = 8
POLICIES = ["write_through", "write_back"]


def start(storage: SimStorage, policy: str = "write_through", **shape: int) -> Rig:
    config = TierConfig(write_policy=policy, prefetch_policy="wait_complete")
    sizes = {"num_pages": 40, "host_pages": 400, **shape}
    return Rig(page_size=P, tiers=config, storage=storage, **sizes)


def ask(rig: Rig, name: str, prompt: list[int]):
    """One request to its end, and the end of all transfers; where its tokens came from."""
    rig.add(name, prompt, max_tokens=1)
    rig.run()
    rig.check_answers()
    check_invariants(rig.cache, idle=True)
    return rig.last[name].cached


def in_storage(rig: Rig, storage: SimStorage, prompt: list[int]) -> list[bool]:
    """Which pages of a prompt storage has."""
    return [link in storage.pages for link in links_of(rig, prompt)]


def links_of(rig: Rig, prompt: list[int]) -> list[bytes]:
    assert rig.tiers is not None
    assert rig.tiers._writes is not None
    return rig.tiers._writes._links.of(NAMESPACE, tokens_to_bytes(prompt))


def stored(rig: Rig, prompt: list[int], policy: str) -> None:
    """The prompt has been computed, and is in storage."""
    assert rig.tiers is not None
    ask(rig, "first", prompt)
    assert policy == "write_through" or rig.tiers.flush(60.0) == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lost", [slice(0, 3), slice(5, 8), slice(0, 8)], ids=str)
def test_what_was_lost_is_written_again_when_it_is_used(policy: str, lost: slice):
    """The host has the pages all the time; after a restart the whole prefix comes from storage."""
    storage = SimStorage()
    rig = start(storage, policy)
    prompt = prompt_of(random.Random(1), PAGES * P + 1)
    stored(rig, prompt, policy)
    assert all(in_storage(rig, storage, prompt))
    puts = storage.puts
    storage.lose(links_of(rig, prompt)[lost])
    ask(rig, "other", prompt_of(random.Random(2), 3))
    assert storage.puts == puts  # not before it is used
    ask(rig, "again", prompt)
    assert all(in_storage(rig, storage, prompt))
    assert storage.puts > puts
    again = start(storage, policy)
    assert ask(again, "after a restart", prompt).storage == PAGES * P


@pytest.mark.parametrize("lost", [slice(0, PAGES), slice(PAGES, None)], ids=["head", "tail"])
def test_a_part_of_a_branched_path_is_written_again_behind_a_small_host(lost: slice):
    """What is stored below is of no use without its head, and the head not whole without a tail."""
    storage = SimStorage()
    rig = start(storage, num_pages=60, host_pages=30)
    rng = random.Random(3)
    head = prompt_of(rng, PAGES * P)
    prompts = [head + prompt_of(rng, 4 * P + 1) for _ in range(2)]
    for number, prompt in enumerate((*prompts, prompts[0])):
        ask(rig, str(number), prompt)
    assert all(in_storage(rig, storage, prompts[0]))
    storage.lose(links_of(rig, prompts[0])[lost])
    for number in range(3):
        ask(rig, f"again {number}", prompts[0])
    assert all(in_storage(rig, storage, prompts[0]))
    again = start(storage, num_pages=60, host_pages=30)
    assert ask(again, "after a restart", prompts[0]).storage == (PAGES + 4) * P


@pytest.mark.parametrize("policy", POLICIES)
def test_what_storage_has_lost_does_not_leave_the_device_without_a_copy(policy: str):
    """A host smaller than the device takes no copies of what is stored; of this it does."""
    storage = SimStorage()
    rig = start(storage, policy, num_pages=40, host_pages=30)
    rng = random.Random(3)
    prompt = prompt_of(rng, PAGES * P + 1)
    stored(rig, prompt, policy)
    storage.lose(links_of(rig, prompt))
    for number in range(2):
        ask(rig, f"other {number}", prompt_of(rng, 20 * P))
    assert ask(rig, "again", prompt).host == PAGES * P


def test_pages_on_the_device_alone_are_copied_for_it():
    """The host has lost its copies: storage gets the pages by way of the host again."""
    storage = SimStorage()
    rig = start(storage, num_pages=40, host_pages=30)
    prompt = prompt_of(random.Random(3), PAGES * P + 1)
    stored(rig, prompt, "write_through")
    rig.cache.leader.host._drop_duplicates(30)
    storage.lose(links_of(rig, prompt))
    ask(rig, "again", prompt)
    assert all(in_storage(rig, storage, prompt))


def test_write_back_waits_until_they_leave_the_device():
    storage = SimStorage()
    rig = start(storage, "write_back", num_pages=12, host_pages=20)
    prompt = prompt_of(random.Random(4), PAGES * P + 1)
    stored(rig, prompt, "write_back")
    ask(rig, "back on the device alone", prompt)
    rig.cache.leader.host._drop_duplicates(20)
    storage.lose(links_of(rig, prompt))
    ask(rig, "again", prompt)
    assert not any(in_storage(rig, storage, prompt))
    for number in range(3):
        ask(rig, f"other {number}", prompt_of(random.Random(50 + number), 40))
    assert all(in_storage(rig, storage, prompt))


def test_what_comes_to_the_host_again_is_written_without_being_used():
    """write_back: lost after the last use, and then it leaves the device."""
    storage = SimStorage()
    rig = start(storage, "write_back", num_pages=12, host_pages=20)
    prompt = prompt_of(random.Random(8), PAGES * P + 1)
    stored(rig, prompt, "write_back")
    rig.cache.leader.host._drop_duplicates(20)
    storage.lose(links_of(rig, prompt))
    for number in range(3):
        ask(rig, f"other {number}", prompt_of(random.Random(50 + number), 40))
    assert all(in_storage(rig, storage, prompt))


def test_more_losses_than_can_be_told_are_believed_of_everything():
    storage = SimStorage()
    rig = start(storage)
    prompt = prompt_of(random.Random(5), PAGES * P + 1)
    stored(rig, prompt, "write_through")
    for link in links_of(rig, prompt):
        del storage.pages[link]
    storage.overflow()
    ask(rig, "again", prompt)
    assert all(in_storage(rig, storage, prompt))


def test_no_page_is_written_twice_at_the_same_time(monkeypatch: pytest.MonkeyPatch):
    """The prompt's pages are on their way when the request ends and its nodes become one."""
    rig = Rig(
        page_size=P,
        num_pages=40,
        host_pages=400,
        storage=SimStorage(),
        transfers={"costs": TransferCosts(storage_page_s=0.5)},
    )
    submit, writes = rig.transfers.submit, []

    def watched(transfer: Transfer) -> None:
        if transfer.kind is TransferKind.BACKUP_STORAGE:
            flying = [flight.transfer for flight in rig.transfers._flights.values()]
            assert set(transfer.links).isdisjoint(link for each in flying for link in each.links)
            writes.append(transfer)
        submit(transfer)

    monkeypatch.setattr(rig.transfers, "submit", watched)
    rig.add("long", prompt_of(random.Random(9), PAGES * P + 1), max_tokens=5 * P)
    rig.run()
    assert len(writes) > 1


def test_the_memory_of_losses_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writes_module, "MAX_LOST", 20)
    storage = SimStorage()
    rig = start(storage)
    prompts = [prompt_of(random.Random(60 + i), PAGES * P + 1) for i in range(8)]
    for number, prompt in enumerate(prompts):
        ask(rig, f"r{number}", prompt)
        storage.lose(links_of(rig, prompt))
    assert rig.tiers is not None
    assert rig.tiers._writes is not None
    rig.tiers.poll()
    assert len(rig.tiers._writes._lost) <= 20 + PAGES
    for number, prompt in enumerate(prompts):
        ask(rig, f"again{number}", prompt)
        assert all(in_storage(rig, storage, prompt))


def test_what_is_put_again_is_lost_no_longer():
    """Otherwise every use would ask for it again."""
    storage = SimStorage()
    rig = start(storage)
    prompt = prompt_of(random.Random(7), PAGES * P + 1)
    stored(rig, prompt, "write_through")
    storage.lose(links_of(rig, prompt)[:2])
    ask(rig, "again", prompt)
    puts = storage.puts
    ask(rig, "third", prompt)
    assert storage.puts == puts
    assert rig.tiers is not None
    assert rig.tiers._writes is not None
    assert not rig.tiers._writes._lost


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_stored_means_stored(seed: int):
    """Walks with failures over a storage that loses pages: what a node says of storage is true but
    for losses that it was told of and that nobody has used since."""
    storage = SimStorage()
    rig = walk(seed, page_size=P, steps=250, storage=storage)
    assert rig.tiers is not None
    writes = rig.tiers._writes
    assert writes is not None
    rig.tiers.poll()
    for node in rig.cache.state.tree.nodes.values():
        if node.stored:
            links = writes._links.of(node.namespace, path_tokens(node))[-node.num_pages :]
            assert all(link in storage.pages or link in writes._lost for link in links)
