"""A naive world around a PrefixCache with windows: dictionaries, and memories that remember.

As in `world`, a page of memory holds everything up to its end, and nothing is compressed or
incremental. A window page that a restart has filled before it was right holds WRONG.
"""

from __future__ import annotations

from collections import Counter

from phloem.cache import PrefixCache, Reservation
from phloem.cache.components import ABSENT
from phloem.cache.state import CacheState
from phloem.core.errors import NoRoom
from phloem.core.refs import owner_of
from tests.cache.windows import valid_lengths
from tests.cache.world import price_of

TOKEN = 4
Prefix = tuple[bytes, bytes]
WRONG: Prefix = (b"wrong", b"")


class Runner:
    """One running request, with the tables that a worker would hold."""

    def __init__(self, namespace: bytes, tokens: bytes, reservation: Reservation, share: bool):
        self.namespace = namespace
        self.tokens = tokens
        self.reservation = reservation
        self.share = share
        self.table: list[int] = reservation.refs.tolist()
        self.window: dict[int, int] = {}  # page -> ref, of what is held
        self.own: set[int] = set()  # pages of these that are not in the tree
        self.position = reservation.start
        self.committed = 0
        self.shared = reservation.num_cached_pages
        self.right_from = 0
        self.low = 0


class WindowWorld:
    """The cache under test, a follower of it, and what both must agree with."""

    def __init__(self, cache: PrefixCache, *, invariants: bool = True) -> None:
        assert cache.window is not None
        self.cache, self.config = cache, cache.window
        self.size = cache.page_size
        self.page = cache.page_size * TOKEN
        self.tail = -(-(cache.window.tokens - 1) // cache.page_size)
        self.invariants = invariants
        self.full: dict[Prefix, int] = {}  # committed and not evicted
        self.win: dict[Prefix, int] = {}  # of these, the window state
        self.memory: dict[int, Prefix | None] = {}
        self.wmemory: dict[int, Prefix | None] = {}
        self.zombies: Counter[int] = Counter()  # window pages of a flushed tree: who locks them
        self.runners: list[Runner] = []
        self.seen: Counter[str] = Counter()
        self.follower = self.make_follower()
        cache.leader.log.attach(self.follower)

    def make_follower(self) -> CacheState:
        return CacheState(self.cache.page_size, self.cache.num_pages, window=self.cache.window)

    # What the dictionaries say.

    def prefix(self, namespace: bytes, tokens: bytes, pages: int) -> Prefix:
        return namespace, tokens[: pages * self.page]

    def full_pages(self, namespace: bytes, tokens: bytes, limit: int) -> int:
        pages = 0
        while pages < limit and self.prefix(namespace, tokens, pages + 1) in self.full:
            pages += 1
        return pages

    def lengths(self, namespace: bytes, tokens: bytes, pages: int) -> list[int]:
        alive = {
            n - 1 for n in range(1, pages + 1) if self.prefix(namespace, tokens, n) in self.win
        }
        return valid_lengths(alive, pages, window=self.config.tokens, page_size=self.size)

    def locked(self) -> set[Prefix]:
        return {
            self.prefix(runner.namespace, runner.tokens, pages)
            for runner in self.runners
            for pages in range(1, runner.shared + 1)
        }

    def locked_windows(self) -> set[int]:
        return {
            ref
            for runner in self.runners
            for page, ref in runner.window.items()
            if page not in runner.own
        }

    def window_room(self) -> list[int]:
        """Free pages of each owner, and those in the tree that nobody locks."""
        idle = Counter(map(owner_of, set(self.win.values()) - self.locked_windows()))
        allocators = self.cache.leader.window.state.allocators
        return [allocator.num_free + idle[allocator.owner] for allocator in allocators]

    def window_needs(self, runner: Runner, pages: range) -> Counter[int]:
        """Of each owner: a window page lies beside its full page."""
        return Counter(owner_of(runner.table[page]) for page in pages)

    # What happens.

    def open(self, namespace: bytes, tokens: bytes, *, restart: bool, share: bool) -> None:
        """Ask, compare the answer with the dictionaries, reserve."""
        num_tokens = len(tokens) // TOKEN
        limit = (num_tokens - 1) // self.size
        before = self.cache.state.digest()
        match = self.cache.match(namespace, tokens, max_pages=limit)
        full = self.full_pages(namespace, tokens, limit)
        lengths = self.lengths(namespace, tokens, full)
        assert match.full_pages == full
        assert list(match.valid_lengths) == lengths, "other lengths are valid by the book"
        assert match.num_pages == lengths[-1]
        assert self.cache.state.digest() == before, "a match changed the cache"
        cached = full if restart else lengths[-1]
        wanted = -(-num_tokens // self.size)
        path = {self.prefix(namespace, tokens, n) for n in range(1, cached + 1)}
        free = self.cache.free_pages
        fits = wanted - cached <= free + len(self.full.keys() - self.locked() - path)
        new = wanted - match.num_pages
        assert self.cache.can_reserve(match, new, restart=restart) == fits
        try:
            reservation = self.cache.reserve(match, new, restart=restart, share=share)
        except NoRoom:
            assert not fits, "refused although there is room"
            assert self.cache.state.digest() == before, "not atomic"
            return
        assert fits, "admitted although there is no room"
        assert (reservation.num_cached_pages, reservation.num_pages) == (cached, wanted)
        runner = Runner(namespace, tokens, reservation, share)
        self._start(runner, full, lengths[-1], restart=restart)
        self.runners.append(runner)
        missing = wanted - cached
        more = price_of(self.cache, missing)
        self._settle(evicting=missing - free, evicting_windows=None, more=more)

    def _start(self, runner: Runner, full: int, valid: int, *, restart: bool) -> None:
        """Where it begins, by the book, and what it holds there."""
        reservation, size = runner.reservation, self.size
        reach = self.config.tokens - 1
        deep = (full - self.tail) * size - (self.config.layers - 1) * reach
        deep = max(0, deep // size)
        is_deep = restart and full > valid and deep > valid
        start = deep if is_deep else valid
        assert reservation.start == start * size
        assert reservation.write_from == max(start, reservation.num_cached_pages) * size
        assert reservation.window_from == (start * size if is_deep else 0)
        runner.committed = start
        self.seen.update(deep=is_deep, restarts=restart and full > valid, hits=valid > 0)
        if is_deep:
            runner.right_from, runner.low = full - self.tail, start
            assert not reservation.window_refs.tolist()[start:]
            return
        runner.low = max(0, valid - self.tail)
        table = reservation.window_refs.tolist()
        assert len(table) == valid
        for page in range(runner.low, valid):
            content = self.prefix(runner.namespace, runner.tokens, page + 1)
            assert table[page] == self.win[content], "the tail is not the tree's"
            runner.window[page] = table[page]

    def compute(self, runner: Runner, count: int) -> None:
        """Compute up to `count` positions and commit them; nothing if window pages are missing."""
        start = runner.position
        stop = min(start + count, len(runner.tokens) // TOKEN)
        self._advance(runner, start)
        end = -(-stop // self.size)
        have = max(runner.window, default=runner.low - 1) + 1
        have = max(have, runner.low, start // self.size if not runner.window else 0)
        missing = end - have
        needs = self.window_needs(runner, range(have, end))
        free = [a.num_free for a in self.cache.leader.window.state.allocators]
        room = self.window_room()
        fits = all(need <= room[owner] for owner, need in needs.items())
        assert (runner.reservation.window_fitting(missing) == max(0, missing)) == fits
        before = self.cache.state.digest()
        try:
            changed = runner.reservation.window_extend(end)
        except NoRoom:
            assert not fits, "refused although there is room"
            assert before == self.cache.state.digest(), "not atomic"
            return
        assert fits, "extended although there is no room"
        if missing > 0:
            assert (changed.first_page, len(changed.refs)) == (have, missing)
            for page, ref in enumerate(changed.refs.tolist(), have):
                assert owner_of(ref) == owner_of(runner.table[page]), "not beside its full page"
                runner.window[page] = ref
                runner.own.add(page)
        else:
            assert changed is None
        evicting = sum(max(0, need - free[owner]) for owner, need in needs.items())
        self._settle(evicting=0, evicting_windows=evicting)
        self._write(runner, start, stop)
        runner.position = stop
        self._commit(runner, stop)

    def _advance(self, runner: Runner, position: int) -> None:
        runner.reservation.window_advance(position)
        low = (position - self.config.tokens + 1) // self.size
        if runner.share:
            low = min(low, runner.committed - self.tail)
        self._let_go(runner, max(runner.low, low))

    def _let_go(self, runner: Runner, low: int) -> None:
        """Pages below `low` are given back: own ones and those of a flushed tree are free now."""
        freed = set()
        for page in [page for page in runner.window if page < low]:
            ref = runner.window.pop(page)
            if page in runner.own:
                runner.own.discard(page)
                freed.add(ref)
            elif self.zombies[ref]:
                self.zombies[ref] -= 1
                if not self.zombies[ref]:
                    freed.add(ref)
        runner.low = low
        self._settle(evicting=0, evicting_windows=0, own=freed)

    def _write(self, runner: Runner, start: int, stop: int) -> None:
        """What a worker writes: full pages from `write_from` on, window pages of the whole span."""
        for page in range(start // self.size, stop // self.size):
            content = self.prefix(runner.namespace, runner.tokens, page + 1)
            if page * self.size >= runner.reservation.write_from:
                self.memory[runner.table[page]] = content
            wrong = page < runner.right_from
            assert page in runner.own, "a page of somebody else is written"
            self.wmemory[runner.window[page]] = WRONG if wrong else content

    def _commit(self, runner: Runner, stop: int) -> None:
        pages = stop // self.size
        changed = runner.reservation.commit(runner.tokens[: stop * TOKEN])
        if changed is not None:
            end = changed.first_page + len(changed.refs)
            runner.table[changed.first_page : end] = changed.refs.tolist()
        more = pages > runner.committed
        runner.committed = max(runner.committed, pages)
        if runner.share and more:
            for page in range(runner.shared, pages):
                content = self.prefix(runner.namespace, runner.tokens, page + 1)
                assert self.full.setdefault(content, runner.table[page]) == runner.table[page]
            runner.shared = max(runner.shared, pages)
            self._join(runner, pages)
        self._settle(evicting=0, evicting_windows=0)

    def _join(self, runner: Runner, pages: int) -> None:
        """Own window pages of what is committed join the tree where it has none."""
        for page in range(max(runner.low, runner.right_from), pages):
            content = self.prefix(runner.namespace, runner.tokens, page + 1)
            if page in runner.own and content not in self.win:
                if owner_of(runner.window[page]) != owner_of(runner.table[page]):
                    self.seen["misplaced"] += 1  # another request was first, on another rank
                    continue
                self.win[content] = runner.window[page]
                runner.own.discard(page)

    def close(self, runner: Runner, *, has_tail: bool = True) -> None:
        """End a request; then the tail of what it has computed is there (not after a load)."""
        runner.reservation.close()
        misplaced = self.seen["misplaced"]
        if runner.share:
            self._join(runner, runner.committed)
        has_tail = has_tail and misplaced == self.seen["misplaced"]
        self.runners.remove(runner)
        self._let_go(runner, len(runner.table) + 1)
        if has_tail and runner.share and runner.committed >= runner.right_from + self.tail:
            tokens, end = runner.tokens, runner.committed
            assert self.lengths(runner.namespace, tokens, end)[-1] == end, "the tail is not there"

    def is_loading(self, runner: Runner) -> bool:
        """Its pages are not there yet."""
        return False

    def end(self, runner: Runner) -> None:
        self.close(runner)

    def evict(self, pages: int) -> None:
        available = len(self.full.keys() - self.locked())
        assert self.cache.evict(pages) == min(pages, available)
        self._settle(evicting=min(pages, available), evicting_windows=None)

    def evict_windows(self, pages: int) -> None:
        available = len(set(self.win.values()) - self.locked_windows())
        assert self.cache.evict_window(pages) == min(pages, available)
        self._settle(evicting=0, evicting_windows=min(pages, available))

    def flush(self) -> None:
        self.cache.flush()
        self.full.clear()
        self.win.clear()
        for runner in self.runners:
            runner.share = False
            runner.shared = 0
        self.zombies = Counter(
            ref
            for runner in self.runners
            for page, ref in runner.window.items()
            if page not in runner.own
        )
        for ref in self.cache.take_freed().tolist():
            self.memory[ref] = None
        for ref in self.cache.take_freed_window().tolist():
            assert not self.zombies[ref], "a page that is read was freed"
            self.wmemory[ref] = None
        self.check()

    # What must be.

    def _settle(
        self,
        *,
        evicting: int,
        evicting_windows: int | None,
        more: int = 0,
        own: set[int] = frozenset(),
    ) -> None:
        """Look at what was freed: it is what was to be, and nobody reads it.

        `more`: may be evicted beyond that in the full component.
        """
        locked, locked_windows = self.locked(), self.locked_windows()
        gone: list[Prefix] = []
        for ref in self.cache.take_freed().tolist():
            content, self.memory[ref] = self.memory.get(ref), None
            if content is not None and self.full.get(content) == ref:
                assert content not in locked, "a locked page was evicted"
                del self.full[content]
                gone.append(content)
        assert 0 <= len(gone) - max(0, evicting) <= more, "evicted too much or too little"
        freed = self.cache.take_freed_window().tolist()
        assert len(freed) == len(set(freed)), "a window page was freed twice"
        along = {self.win[content] for content in gone if content in self.win}
        assert along <= set(freed), "window state outlives its full state"
        lost = set(freed) - own
        assert own <= set(freed), "a request's own window page leaks"
        assert not lost & locked_windows, "a locked window page was evicted"
        by_ref = {ref: content for content, ref in self.win.items()}
        for ref in lost:
            del self.win[by_ref[ref]]
        if evicting_windows is not None:
            assert len(lost - along) == evicting_windows, "evicted too many or too few windows"
        for ref in freed:
            self.wmemory[ref] = None
        self.check()

    def check(self) -> None:
        for content, ref in self.full.items():
            assert self.memory[ref] == content, "a cached page holds something else"
        for content, ref in self.win.items():
            assert content in self.full, "window state without full state"
            assert owner_of(ref) == owner_of(self.full[content]), "not beside its full page"
            assert self.wmemory[ref] == content, "a window page holds something else"
        for runner in self.runners:
            self._check_runner(runner)
        assert self.cache.window_room() == self.window_room()

    def _check_runner(self, runner: Runner) -> None:
        assert runner.reservation.refs.tolist() == runner.table, "the worker was not told"
        held = runner.reservation.window_refs.tolist()
        expected = [runner.window.get(page, ABSENT) for page in range(len(held))]
        assert held == expected, "the window table is another one"
        whole = runner.position // self.size
        for page in range(whole):
            content = self.prefix(runner.namespace, runner.tokens, page + 1)
            assert self.memory.get(runner.table[page]) == content or (
                page >= runner.reservation.num_cached_pages and page >= runner.position // self.size
            ), "a table holds a wrong page"
        first = (runner.position - self.config.tokens + 1) // self.size
        first = max(first, runner.reservation.window_from // self.size, 0)
        for page in range(first, whole):
            content = self.prefix(runner.namespace, runner.tokens, page + 1)
            wrong = page < runner.right_from
            assert self.wmemory[runner.window[page]] == (WRONG if wrong else content), (
                "a window table holds a wrong page"
            )

    def check_replicas(self) -> None:
        assert self.follower.digest() == self.cache.state.digest(), "replicas differ"
