"""The naive world with a host tier: copies of both components, loads that take their time.

Which copies the host keeps is its own business: the dictionaries follow the tree there, and check
what the memories hold, which lengths are said to be loadable, and what a load brings.
"""

from __future__ import annotations

from array import array

from phloem.cache import PrefixCache
from phloem.cache.components import ABSENT
from phloem.cache.node import Node
from phloem.cache.state import CacheState
from phloem.core.errors import NoRoom
from tests.cache.window_world import Prefix, Runner, WindowWorld
from tests.cache.windows import valid_lengths
from tests.cache.world import price_of


class WindowHostWorld(WindowWorld):
    """Adds host memory; a load is finished by `end_load`, well or not."""

    def __init__(self, cache: PrefixCache, *, invariants: bool = True) -> None:
        super().__init__(cache, invariants=invariants)
        self.host: dict[int, Prefix] = {}  # slot -> what was copied there last
        self.whost: dict[int, Prefix] = {}
        self.loading: dict[Runner, int] = {}  # the length that it loads up to

    def make_follower(self) -> CacheState:
        cache = self.cache
        return CacheState(
            cache.page_size,
            cache.num_pages,
            host_pages=cache.leader.host.capacity,
            window=cache.window,
        )

    def copies(self) -> tuple[dict[Prefix, int], dict[Prefix, int]]:
        """Host slots of full and of window state, by prefix, as the tree has them."""
        full: dict[Prefix, int] = {}
        window: dict[Prefix, int] = {}

        def walk(node: Node, tokens: bytes) -> None:
            for index, slot in enumerate(node.host_list()):
                full[node.namespace, tokens + node.key[: (index + 1) * self.page]] = slot
            for index, slot in enumerate(node.extra[0].host_list() if node.extra else ()):
                if slot != ABSENT:
                    window[node.namespace, tokens + node.key[: (index + 1) * self.page]] = slot
            for child in node.children.values():
                walk(child, tokens + node.key)

        walk(self.cache.state.tree.root, b"")
        return full, window

    def back_up(self, namespace: bytes, tokens: bytes, *, done: bool) -> None:
        """Copy what a known path has not got on the host yet, in both components."""
        tree, leader = self.cache.state.tree, self.cache.leader
        node, pages, matched = tree.find(namespace, tokens, len(tokens) // self.page * self.page)
        if not matched or pages < node.num_pages or not node.refs:
            return
        first = matched // self.page
        copied, wcopied = self.copies()
        while first and self.prefix(namespace, tokens, first) not in copied:
            first -= 1
        last = matched // self.page
        if first < last:
            backup = leader.begin_backup(node, last - first)
            if backup is not None:
                slots = array("q", backup.slots)
                for page, slot in zip(range(first, last), slots, strict=True):
                    self.host[slot] = self.prefix(namespace, tokens, page + 1)
                leader.end_backup(backup, done=done)
        self._back_up_windows(namespace, tokens, last, wcopied, done=done)
        self._settle(evicting=0, evicting_windows=0)

    def _back_up_windows(
        self, namespace: bytes, tokens: bytes, last: int, copied: dict[Prefix, int], *, done: bool
    ) -> None:
        tree, host = self.cache.state.tree, self.cache.leader.window_host
        node, _, matched = tree.find(namespace, tokens, last * self.page)
        assert matched == last * self.page
        prefixes = [self.prefix(namespace, tokens, n + 1) for n in range(last)]
        wanted = [p for p in prefixes[-self.tail :] if p in self.win and p not in copied]
        if not wanted or not self.tail:
            return
        backup = host.begin_backup(node, [self.win[prefix] for prefix in wanted])
        if backup is None:
            return
        self.whost.update(zip(backup.window_slots, wanted, strict=True))
        host.end_backup(backup, done=done)

    def open_loading(self, namespace: bytes, tokens: bytes, choice: float) -> None:
        """Ask, compare the loadable lengths with the book, and begin a load of one of them."""
        num_tokens = len(tokens) // 4
        limit = (num_tokens - 1) // self.size
        match = self.cache.match(namespace, tokens, max_pages=limit)
        copied, wcopied = self.copies()
        device = self.full_pages(namespace, tokens, limit)
        known = device
        while known < limit and self.prefix(namespace, tokens, known + 1) in copied:
            known += 1
        there = {
            n
            for n in range(known)
            for prefix in [self.prefix(namespace, tokens, n + 1)]
            if prefix in self.win or prefix in wcopied
        }
        expected = valid_lengths(there, known, window=self.config.tokens, page_size=self.size)
        assert list(match.loadable_lengths) == expected, "other lengths are loadable by the book"
        assert match.host_pages == expected[-1] - match.num_pages
        longer = [length for length in expected if length > match.num_pages]
        if not longer:
            return
        length = longer[int(choice * len(longer))]
        before = self.cache.state.digest()
        pages = -(-num_tokens // self.size)
        free = self.cache.free_pages
        load = length - match.num_pages
        try:
            reservation = self.cache.reserve(match, pages - match.num_pages, load_pages=load)
        except NoRoom:
            assert self.cache.state.digest() == before, "not atomic"
            return
        runner = Runner(namespace, tokens, reservation, True)
        cached = min(length, device)
        self._start_load(runner, length, cached, match.num_pages)
        self.seen.update(loads=1, window_loads=len(runner.own) > 0, tail_alone=length == cached)
        self.runners.append(runner)
        self.loading[runner] = length
        missing = pages - cached
        more = price_of(self.cache, missing)
        self._settle(evicting=missing - free, evicting_windows=None, more=more)

    def _start_load(self, runner: Runner, length: int, cached: int, valid: int) -> None:
        reservation = runner.reservation
        assert reservation.start == length * self.size
        assert (reservation.num_cached_pages, reservation.num_committed_pages) == (cached, valid)
        assert reservation.num_loading_pages == length - cached
        runner.committed = valid
        runner.low = max(0, length - self.tail)
        table = reservation.window_refs.tolist()
        assert len(table) == length
        for page in range(runner.low, length):
            runner.window[page] = table[page]
            content = self.prefix(runner.namespace, runner.tokens, page + 1)
            if self.win.get(content) != table[page]:
                assert content not in self.win, "a page that is here is loaded"
                runner.own.add(page)

    def end_load(self, runner: Runner, *, done: bool) -> None:
        """The load has ended: its pages hold what the host held, and they join the tree."""
        length = self.loading.pop(runner)
        reservation = runner.reservation
        cached = reservation.num_cached_pages
        slots = array("q", reservation.load_slots)
        for page, slot in zip(range(cached, length), slots, strict=True):
            self.memory[runner.table[page]] = self.host[slot]
        refs, wslots = (array("q", part) for part in reservation.window_loads)
        assert set(refs) == {runner.window[page] for page in runner.own}
        for ref, slot in zip(refs, wslots, strict=True):
            self.wmemory[ref] = self.whost[slot]
        reservation.end_load()
        if not done:
            self.close(runner, has_tail=False)
            return
        runner.position = length * self.size
        self._commit(runner, length * self.size)

    def is_loading(self, runner: Runner) -> bool:
        return runner in self.loading

    def end(self, runner: Runner) -> None:
        if runner in self.loading:
            self.give_up(runner)
        else:
            self.close(runner)

    def give_up(self, runner: Runner) -> None:
        """A request ends while its pages are loaded: they stay its own until the load has ended."""
        runner.reservation.close()
        self.check()
        self.end_load(runner, done=False)

    def check(self) -> None:
        super().check()
        copied, wcopied = self.copies()
        for prefix, slot in copied.items():
            assert self.host[slot] == prefix, "a host page holds something else"
        for prefix, slot in wcopied.items():
            assert self.whost[slot] == prefix, "a host copy of a window holds something else"
            assert prefix in copied or prefix in self.full, (
                "a window on the host without full state"
            )

    def _check_runner(self, runner: Runner) -> None:
        if runner not in self.loading:
            super()._check_runner(runner)
