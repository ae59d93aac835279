"""A naive world around a PrefixCache: dictionaries of prefixes, and page memory that remembers.

Nothing here is compressed, hashed or incremental. A page of memory holds the namespace and *all*
tokens up to its end, so a page that was swapped, shifted, freed too early or served before it was
computed cannot pass for the right one.
"""

from __future__ import annotations

import random

from phloem.cache import Match, PrefixCache, Reservation, check_invariants
from phloem.cache.placement import Striped
from phloem.cache.state import CacheState
from phloem.core.errors import NoRoom

TOKEN = 4
Prefix = tuple[bytes, bytes]


def price_of(cache: PrefixCache, pages: int) -> int:
    """How many cached pages a run of so many may cost beyond those that are missing."""
    striped = len(cache.num_pages) > 1 and isinstance(cache.leader.placement, Striped)
    return pages // 2 if striped and pages > 0 else 0


class Runner:
    """One running request: its tokens, its reservation, and the table that a worker would hold."""

    def __init__(self, namespace: bytes, tokens: bytes, reservation: Reservation, share: bool):
        self.namespace = namespace
        self.tokens = tokens
        self.reservation = reservation
        self.share = share
        self.table: list[int] = reservation.refs.tolist()
        self.shared = reservation.num_cached_pages
        self.computed = reservation.num_cached_pages


class World:
    """The cache under test, a follower of it, and what both must agree with."""

    def __init__(self, cache: PrefixCache, *, invariants: bool = True, follow: bool = True) -> None:
        self.cache = cache
        self.page = cache.page_size * TOKEN
        self.invariants = invariants
        self.known: dict[Prefix, int] = {}  # committed and not evicted
        self.released: dict[Prefix, int] = {}  # when it was last released
        self.memory: dict[int, Prefix | None] = {}
        self.runners: list[Runner] = []
        self.now = 0
        self.follower: CacheState | None = None
        if follow:
            self.follower = CacheState(cache.page_size, cache.num_pages)
            cache.leader.log.attach(self.follower)

    def prefix(self, namespace: bytes, tokens: bytes, pages: int) -> Prefix:
        return namespace, tokens[: pages * self.page]

    def expected_refs(self, namespace: bytes, tokens: bytes) -> list[int]:
        refs = []
        for pages in range(1, len(tokens) // self.page + 1):
            ref = self.known.get(self.prefix(namespace, tokens, pages))
            if ref is None:
                break
            refs.append(ref)
        return refs

    def locked(self) -> set[Prefix]:
        return {
            self.prefix(runner.namespace, runner.tokens, pages)
            for runner in self.runners
            for pages in range(1, runner.shared + 1)
        }

    def lru_victims(self, count: int) -> list[Prefix]:
        """The next victims by the book: the page released longest ago that has no page after it."""
        left = dict(self.known)
        locked = self.locked()
        out: list[Prefix] = []
        while len(out) < count:
            parents = {(ns, tokens[: -self.page]) for ns, tokens in left}
            leaves = [p for p in left if p not in parents and p not in locked]
            if not leaves:
                break
            victim = min(leaves, key=lambda p: self.released[p])
            del left[victim]
            out.append(victim)
        return out

    def match(self, namespace: bytes, tokens: bytes) -> Match:
        """Ask, and compare the answer with the dictionary."""
        before = self.cache.state.digest()
        match = self.cache.match(namespace, tokens)
        refs = match.refs().tolist()
        assert refs == self.expected_refs(namespace, tokens), "a match differs from the dictionary"
        assert match.num_pages == len(refs)
        assert match.num_tokens == len(refs) * self.cache.page_size
        assert self.cache.state.digest() == before, "a match changed the cache"
        return match

    def reserve(self, match: Match, new_pages: int, *, share: bool = True) -> Runner | None:
        """Reserve on a match that may be stale; None where there is no room."""
        wanted = match.num_pages + new_pages
        namespace, tokens = match.namespace, match.tokens
        cached = min(len(self.expected_refs(namespace, tokens)), match.end // self.page)
        missing = max(0, wanted - cached)
        path = {self.prefix(namespace, tokens, n) for n in range(1, cached + 1)}
        locked = self.locked()
        free = self.cache.free_pages
        evictable = len(self.known.keys() - locked - path)
        fits = missing <= free + evictable
        assert self.cache.can_reserve(match, new_pages) == fits, "can_reserve is wrong"
        before = self.cache.state.digest(), self.cache.stats()
        try:
            reservation = self.cache.reserve(match, new_pages, share=share)
        except NoRoom:
            assert not fits, "refused although there is room"
            assert before == (self.cache.state.digest(), self.cache.stats()), "not atomic"
            return None
        assert fits, "admitted although there is no room"
        assert reservation.num_cached_pages == cached
        assert reservation.num_pages == cached + missing
        runner = Runner(namespace, tokens, reservation, share and self.cache.enabled)
        self.runners.append(runner)
        self._settle(evicting=missing - free, more=price_of(self.cache, missing))
        self._written_exclusively(runner)
        return runner

    def extend(self, runner: Runner, pages: int) -> bool:
        """Ask for more pages; False (and nothing changed) where there is no room."""
        free, before = self.cache.free_pages, self.cache.state.digest()
        fits = pages <= free + len(self.known.keys() - self.locked())
        try:
            runner.reservation.extend(pages)
        except NoRoom:
            assert not fits, "refused although there is room"
            assert before == self.cache.state.digest(), "not atomic"
            return False
        assert fits, "extended although there is no room"
        runner.table += runner.reservation.refs[len(runner.table) :].tolist()
        self._settle(evicting=pages - free, more=price_of(self.cache, pages))
        self._written_exclusively(runner)
        return True

    def commit(self, runner: Runner, pages: int) -> None:
        """Compute the request's first `pages` pages, and commit them."""
        reservation = runner.reservation
        for index in range(runner.computed, pages):
            content = self.prefix(runner.namespace, runner.tokens, index + 1)
            self.memory[runner.table[index]] = content
        runner.computed = max(runner.computed, pages)
        old = list(runner.table)
        changed = reservation.commit(runner.tokens[: pages * self.page])
        if changed is not None:
            stop = changed.first_page + len(changed.refs)
            runner.table[changed.first_page : stop] = changed.refs.tolist()
        assert reservation.num_committed_pages >= pages
        if runner.share and pages > runner.shared:
            for index in range(runner.shared, pages):
                content = self.prefix(runner.namespace, runner.tokens, index + 1)
                if content in self.known:
                    assert runner.table[index] == self.known[content], "not the canonical page"
                else:
                    assert runner.table[index] == old[index], "a page moved for no reason"
                    self.known[content] = runner.table[index]
            runner.shared = pages
        self._settle(evicting=0)

    def close(self, runner: Runner) -> None:
        """End a request: done, aborted or retracted."""
        self.now += 1
        self.runners.remove(runner)
        still = self.locked()
        for pages in range(1, runner.shared + 1):
            content = self.prefix(runner.namespace, runner.tokens, pages)
            if content not in still:
                self.released[content] = self.now
        runner.reservation.close()
        self._settle(evicting=0)

    def evict(self, pages: int) -> None:
        """Evict; the pages that go are those that the book names."""
        available = len(self.known.keys() - self.locked())
        expected = self.lru_victims(pages)
        done = self.cache.evict(pages)
        assert done == min(pages, available) == len(expected)
        self._settle(evicting=done, expected=expected)

    def flush(self) -> None:
        """Forget everything; what runs goes on, and shares nothing any more."""
        self.known.clear()
        held = {ref for runner in self.runners for ref in runner.table}
        assert self.cache.flush() == len(held)
        for runner in self.runners:
            runner.share = False
            runner.shared = 0
        self._settle(evicting=None)

    def _settle(
        self, *, evicting: int | None, more: int = 0, expected: list[Prefix] | None = None
    ) -> None:
        """Look at what was freed; then at everything else. `more`: may be evicted beyond that."""
        gone = []
        locked = self.locked()
        for ref in self.cache.take_freed().tolist():
            content = self.memory.get(ref)
            self.memory[ref] = None  # what NaN is in a real pool
            if content is not None and self.known.get(content) == ref:
                assert content not in locked, "a locked page was evicted"
                del self.known[content]
                gone.append(content)
        if evicting is not None:
            assert 0 <= len(gone) - max(0, evicting) <= more, "evicted too much or too little"
        if expected is not None:
            assert sorted(gone) == sorted(expected), "not the least recently used pages"
        self.check()

    def check(self) -> None:
        """Every table holds the right tokens; nobody shares a page that is not committed."""
        for namespace, tokens in self.known:
            parent = tokens[: -self.page]
            assert not parent or (namespace, parent) in self.known, "a page without its parent"
        for content, ref in self.known.items():
            assert self.memory[ref] == content, "a cached page holds something else"
        for runner in self.runners:
            assert runner.reservation.refs.tolist() == runner.table, "the worker was not told"
            for index in range(runner.computed):
                content = self.prefix(runner.namespace, runner.tokens, index + 1)
                assert self.memory.get(runner.table[index]) == content, "a table holds a wrong page"
        if self.invariants:
            check_invariants(self.cache, idle=not self.runners)

    def check_replicas(self) -> None:
        """The follower, fed with commands alone, is where the leader is."""
        if self.follower is not None:
            assert self.follower.digest() == self.cache.state.digest(), "replicas differ"

    def _written_exclusively(self, runner: Runner) -> None:
        others = [r for other in self.runners if other is not runner for r in other.table]
        taken = set(others) | set(self.known.values())
        own = runner.table[runner.computed :]
        assert len(set(own)) == len(own)
        assert not taken & set(own), "a page to be written is somebody else's"


class Walk:
    """A seeded random walk through a world."""

    def __init__(self, world: World, seed: int, *, max_pages: int = 10) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.max_tokens = max_pages * world.cache.page_size
        self.texts: list[bytes] = []
        self.stale: Match | None = None

    def run(self, steps: int, *, digest_every: int = 100) -> None:
        """Take steps, then end all requests and flush."""
        for step in range(steps):
            self.step()
            if step % digest_every == 0:
                self.world.check_replicas()
        while self.world.runners:
            self.world.close(self.world.runners[0])
        self.world.flush()
        assert self.world.cache.free_pages == self.world.cache.total_pages
        self.world.check_replicas()

    def step(self) -> None:
        """One random step."""
        rng, world = self.rng, self.world
        roll = rng.random()
        if roll < 0.34 or not world.runners:
            self._open()
            return
        runner = rng.choice(world.runners)
        if roll < 0.60:
            most = min(len(runner.table), len(runner.tokens) // world.page)
            world.commit(runner, rng.randint(0, most))
        elif roll < 0.70:
            if not world.extend(runner, rng.randint(1, 3)):
                world.close(runner)
        elif roll < 0.96:
            world.close(runner)
        elif roll < 0.995:
            world.evict(rng.randint(0, 6))
        else:
            world.flush()

    def _open(self) -> None:
        rng, world = self.rng, self.world
        tokens = self._text()
        match = world.match(self._namespace(), tokens)
        if self.stale is not None and rng.random() < 0.5:
            match = self.stale  # the tree may have changed since
        self.stale = match if rng.random() < 0.3 else None
        pages = -(-len(match.tokens) // world.page)
        world.reserve(match, max(0, pages - match.num_pages), share=rng.random() < 0.9)

    def _namespace(self) -> bytes:
        return self.rng.choice((b"a", b"a", b"a", b"", b"ab"))

    def _text(self) -> bytes:
        rng = self.rng
        if self.texts and rng.random() < 0.9:
            base = rng.choice(self.texts)
            if rng.random() < 0.3:
                return base
            if rng.random() < 0.6:
                base = base[: rng.randint(0, len(base) // TOKEN) * TOKEN]
        else:
            base = b""
        room = self.max_tokens - len(base) // TOKEN
        tail = [rng.randrange(2) for _ in range(rng.randint(0, max(0, room)))]
        text = base + b"".join(token.to_bytes(TOKEN, "little") for token in tail)
        text = text or bytes(TOKEN)
        if len(self.texts) < 16:
            self.texts.append(text)
        else:
            self.texts[rng.randrange(16)] = text
        return text
