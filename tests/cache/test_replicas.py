"""Replicated by commands: equal logs, equal states, in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phloem.cache import CacheState, PrefixCache
from phloem.replica import commands
from tests.cache.build import make, run_of, serve
from tests.cache.world import Walk, World

ROOT = Path(__file__).resolve().parents[2]


def test_a_recorded_log_rebuilds_the_state():
    """Commands are complete: a replica that starts later and reads them all ends up equal."""
    cache = make(4, 40)
    log = []

    class Recorder:
        def apply(self, command):
            log.append(command)

        def digest(self):
            return ""

    cache.leader.log.attach(Recorder())
    Walk(World(cache, follow=False), 11).run(1000)
    replica = CacheState(4, (40,))
    for command in log:
        replica.apply(command)
    assert replica.digest() == cache.state.digest()
    assert len(log) == cache.leader.log.position > 1000


@pytest.mark.parametrize("field", ["ref", "lock", "token", "order"])
def test_digests_tell_states_apart(field):
    caches = [make(4, 16) for _ in range(2)]
    for cache in caches:
        serve(cache, run_of(0, 16))
        serve(cache, run_of(0, 8) + run_of(100, 8))
    one, two = (cache.state for cache in caches)
    assert one.digest() == two.digest()
    node = two.tree.nodes[max(two.tree.nodes)]
    if field == "ref":
        node.refs = node.refs[8:] + node.refs[:8]
    elif field == "lock":
        node.locks += 1
    elif field == "token":
        node.key = run_of(7, 1) + node.key[4:]
    else:
        two.allocators[0].free(two.allocators[0].alloc(2))
    assert one.digest() != two.digest()


def digests_of_a_walk() -> str:
    """State, log and ghosts after a walk, as one line."""
    cache = PrefixCache(page_size=4, num_pages=(24,), record_freed=True)
    walk = Walk(World(cache), 3)
    for _ in range(400):
        walk.step()
    assert cache.leader.ghosts.keys
    ghosts = [*cache.leader.ghosts.keys]
    return f"{cache.state.digest()} {cache.leader.log.digest()} {ghosts}"


def test_o15_nothing_depends_on_the_process():
    """Digests and content keys are equal under any PYTHONHASHSEED, and on every rank."""
    program = "from tests.cache.test_replicas import digests_of_a_walk as d; print(d())"
    seen = {digests_of_a_walk()}
    for seed in ("0", "1", "4242", "random"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        seen.add(done.stdout.strip())
    assert len(seen) == 1


def test_pages_go_back_to_their_owners():
    """The state serves several owners, though one rank has but one."""
    state = CacheState(4, (3, 5))
    mine, other = state.apply(commands.alloc(0, 2)), state.apply(commands.alloc(1, 4))
    assert state.free_pages == 2
    mixed = b"".join(pair[i : i + 8] for i in (0, 8) for pair in (other, mine))
    state.apply(commands.free(mixed))
    assert [allocator.num_free for allocator in state.allocators] == [3, 3]
    state.apply(commands.free(other[16:]))
    assert state.free_pages == 8
    assert [allocator.num_free for allocator in state.allocators] == [3, 5]
