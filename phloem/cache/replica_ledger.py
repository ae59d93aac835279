"""The leader's side of replicas: which are made, which give way, and what the next plan says of it.

    read(rows)  --hot pages-->  wanted, by rank
    plan(step)  --wanted, as far as there is room-->  `replicate`, and the plan's `made`
    finished(step)  -->  `replicated`; the next plan's `ready`
    a slot is needed, a page is freed, nobody reads it any more  -->  the next plan's `gone`

Where replicas are and how many there are changes nothing else: placement and eviction count them as
free pages, and whoever takes a page makes one give way before anything of the tree is evicted.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from phloem.cache.node import REF_DTYPE
from phloem.cache.replica_policy import HotPages, ReplicaConfig
from phloem.cache.state import CacheState
from phloem.core.plan import ReplicaPlan
from phloem.core.refs import NO_REFS, PageRefs, flat_slots, owner_of, owners_of, slot_of
from phloem.core.stats import ReplicaStats
from phloem.replica import CommandLog, commands

__all__ = ["ReplicaLedger"]

_Ints = npt.NDArray[np.int64]
_Pair = tuple[int, int]

# Hot pages that wait for room are forgotten beyond so many; they are found again when next read.
MAX_WANTED = 4096

ROOM, COLD, PAGE_LEFT = "room", "cold", "page left"


class ReplicaLedger:
    """Decides on replicas and writes their commands. One per leader; of at most 64 owners."""

    def __init__(
        self,
        state: CacheState,
        log: CommandLog,
        config: ReplicaConfig,
        note_freed: Callable[[bytes], None],
    ) -> None:
        """`note_freed`: told the slots of replicas that end."""
        self._state, self._log, self._note_freed = state, log, note_freed
        self.config = config
        self._stride = max(pool.capacity for pool in state.allocators)
        num_pages = self._stride * len(state.allocators)
        self._policy = HotPages(num_pages, config)
        # By page: a bit for each owner that has a replica of it, and for each whose one is ready.
        self._holders = np.zeros(num_pages, dtype=np.uint64)
        self._ready = np.zeros(num_pages, dtype=np.uint64)
        self._wanted: list[dict[int, None]] = [{} for _ in state.allocators]
        # By owner: its replicas, the next one to give way last. Sorted when asked for; forgotten
        # when some are made or read, not with each page that is taken.
        self._turns: list[list[int]] = [[] for _ in state.allocators]
        self._making: dict[int, int] = {}  # replica -> the step that makes it
        self._told: set[int] = set()  # replicas that workers know to be ready
        self._fresh: dict[int, int] = {}  # for the next plan: replica -> page
        self._gone: list[_Pair] = []
        self._reason = PAGE_LEFT
        self._dropped: Counter[str] = Counter({ROOM: 0, COLD: 0, PAGE_LEFT: 0})
        self._made_pages = 0
        self.served_pages = 0  # reads of pages by rows and steps that a replica has served
        state.replicas.on_gone = self._end

    def stats(self) -> ReplicaStats:
        """A snapshot."""
        return ReplicaStats(
            pages=self._state.replicas.num_pages,
            most_pages=sum(self._most(pool.capacity) for pool in self._state.allocators),
            made_pages_total=self._made_pages,
            served_pages_total=self.served_pages,
            dropped_pages_total=tuple(self._dropped.items()),
        )

    def violations(self) -> Iterator[str]:
        """What this knows of replicas, and the replicas themselves, in words where they differ."""
        replicas = self._state.replicas
        holders, ready = np.zeros_like(self._holders), np.zeros_like(self._ready)
        for page, replica in replicas.pairs():
            index, bit = self._index(page), np.uint64(1 << owner_of(replica))
            holders[index] |= bit
            if replicas.is_ready(replica):
                ready[index] |= bit
            stage = (replica in self._making, replica in self._fresh, replica in self._told)
            if sum(stage) != 1 or stage[0] == replicas.is_ready(replica):
                yield f"replica {replica} is at no one stage: {stage}"
        if not np.array_equal(holders, self._holders) or not np.array_equal(ready, self._ready):
            yield "the leader's bits of who holds what differ from the replicas"
        if len(self._making) + len(self._fresh) + len(self._told) != replicas.num_pages:
            yield "the leader follows replicas that there are not"
        for owner, pool in enumerate(self._state.allocators):
            if replicas.count(owner) > self._most(pool.capacity):
                yield f"rank {owner} holds {replicas.count(owner)} replicas"

    # Giving way.

    def make_room(self, owner: int, num_pages: int) -> None:
        """So many pages are about to be taken from the owner's pool: free them of replicas."""
        missing = num_pages - self._state.allocators[owner].num_free
        if missing <= 0:
            return
        turns = self._turns[owner]
        if not turns:
            replicas, pages = self._held(owner)
            turns += replicas[self._policy.coldest_first(pages)[::-1]].tolist()
        held, first = self._state.replicas.held_by(owner), array("q")
        while turns and len(first) < missing:
            replica = turns.pop()
            if replica in held:  # still
                first.append(replica)
        self._drop(first.tobytes(), ROOM)

    def taken(self, refs: bytes) -> None:
        """These pages hold something else from now on."""
        self._policy.forget(self._flat(np.frombuffer(refs, REF_DTYPE)))

    # What is read.

    def read(self, owners: Sequence[int], refs: PageRefs, times: int) -> int:
        """The ranks `owners` read these pages of the tree in as many steps as `times` says.

        Returns how many of them each step reads from replicas instead of from their owners.
        """
        pages, theirs = self._flat(refs), owners_of(refs)
        if len(owners) == 1:
            remote = theirs != owners[0]
            refs, pages, theirs = refs[remote], pages[remote], theirs[remote]
        if not len(pages):
            return 0
        hot = self._policy.read(pages, times)
        self._forget_turns()
        holders, ready = self._holders[pages], self._ready[pages]
        served = 0
        for owner in owners:
            bit = np.uint64(1 << owner)
            others = theirs != owner
            served += int(np.count_nonzero(others & ((ready & bit) != 0)))
            wanted = self._wanted[owner]
            if len(wanted) < MAX_WANTED and self._budget(owner) > 0:
                lacking = hot & others & ((holders & bit) == 0)
                wanted.update(dict.fromkeys(refs[lacking].tolist()))
        return served

    # The plan.

    def plan(self, step: int) -> ReplicaPlan | None:
        """What the plan of `step` says; called once for each, after all of its pages are taken."""
        if self._policy.step():
            self._drop_cold()
        made: dict[int, int] = {}
        for owner, wanted in enumerate(self._wanted):
            if wanted:
                made |= self._replicate(owner, wanted)
        if not (made or self._fresh or self._gone):
            return None
        self._making.update(dict.fromkeys(made, step))
        plan = ReplicaPlan(
            made=_refs(made.values()),
            made_at=_refs(made),
            ready=_refs(self._fresh.values()),
            ready_at=_refs(self._fresh),
            gone=_refs(page for page, _ in self._gone),
            gone_at=_refs(replica for _, replica in self._gone),
        )
        self._told.update(self._fresh)
        self._fresh, self._gone = {}, []
        return plan

    def finished(self, step: int) -> None:
        """All ranks have finished `step`: what it made may be read from the next plan on."""
        done = [replica for replica, made_in in self._making.items() if made_in == step]
        if not done:
            return
        self._log.append(commands.replicated(array("q", done).tobytes()))
        pages: list[list[int]] = [[] for _ in self._wanted]
        for replica in done:
            del self._making[replica]
            owner = owner_of(replica)
            page = self._state.replicas.held_by(owner)[replica]
            self._fresh[replica] = page
            pages[owner].append(page)
        for owner, ready in enumerate(pages):
            self._mark(self._ready, owner, ready)

    def _replicate(self, owner: int, wanted: dict[int, None]) -> dict[int, int]:
        """Replica -> page of those that the owner is to make."""
        limit = min(self._budget(owner), self.config.pages_per_step)
        pages: list[int] = []
        while wanted and len(pages) < limit:
            page = next(iter(wanted))
            del wanted[page]
            if self._may_have(owner, page):
                pages.append(page)
        if not pages:
            return {}
        packed = array("q", pages).tobytes()
        replicas = cast(bytes, self._log.append(commands.replicate(owner, packed)))
        self.taken(replicas)
        self._made_pages += len(pages)
        self._turns[owner].clear()
        self._mark(self._holders, owner, pages)
        return dict(zip(array("q", replicas), pages, strict=True))

    def _may_have(self, owner: int, page: int) -> bool:
        """Is it still there, and what was read? A page that is taken anew is no longer hot."""
        if not self._state.allocators[owner_of(page)].is_used(slot_of(page)):
            return False
        held = self._state.replicas.replica(page, owner) is not None
        return not held and self._policy.is_hot(self._index(page))

    def _budget(self, owner: int) -> int:
        """How many more replicas the owner may hold."""
        pool = self._state.allocators[owner]
        left = self._most(pool.capacity) - self._state.replicas.count(owner)
        return min(left, pool.num_free - int(self.config.reserve * pool.capacity))

    def _most(self, capacity: int) -> int:
        return int(self.config.fraction * capacity)

    def _drop_cold(self) -> None:
        self._forget_turns()
        for owner in range(len(self._state.allocators)):
            replicas, pages = self._held(owner)
            cold = replicas[self._policy.cold(pages)]
            if len(cold):
                self._drop(cold.tobytes(), COLD)

    def _held(self, owner: int) -> tuple[PageRefs, _Ints]:
        """An owner's replicas, and their pages by number, in the order in which they were made."""
        held = self._state.replicas.held_by(owner)
        pages = np.fromiter(held.values(), REF_DTYPE, len(held))
        return np.fromiter(held, REF_DTYPE, len(held)), self._flat(pages)

    def _forget_turns(self) -> None:
        for turns in self._turns:
            turns.clear()

    def _drop(self, replicas: bytes, reason: str) -> None:
        self._reason = reason
        self._log.append(commands.drop_replicas(replicas))
        self._reason = PAGE_LEFT

    def _end(self, gone: list[_Pair]) -> None:
        """Replicas have ended, by whatever command."""
        self._dropped[self._reason] += len(gone)
        self._note_freed(_refs(replica for _, replica in gone).tobytes())
        for page, replica in gone:
            keep = ~np.uint64(1 << owner_of(replica))
            self._holders[self._index(page)] &= keep
            self._ready[self._index(page)] &= keep
            self._making.pop(replica, None)
            self._fresh.pop(replica, None)
            if replica in self._told:
                self._told.remove(replica)
                self._gone.append((page, replica))

    def _mark(self, bits: npt.NDArray[np.uint64], owner: int, pages: list[int]) -> None:
        """Set an owner's bit of pages, each of which is named once."""
        if pages:
            bits[self._flat(np.array(pages, REF_DTYPE))] |= np.uint64(1 << owner)

    def _flat(self, refs: PageRefs) -> _Ints:
        return flat_slots(refs, self._stride)

    def _index(self, page: int) -> int:
        return owner_of(page) * self._stride + slot_of(page)


def _refs(refs: Iterable[int]) -> PageRefs:
    found = np.array(list(refs), REF_DTYPE)
    return found if len(found) else NO_REFS
