"""Host to storage, window state: the tails that are on the host, under keys of their own.

A page's window state is one more object of the same link (see `kv.keys`), so a prefix is found
whole: it can be restored from storage if its full pages are there and the window state of its last
T pages. What has been stored is remembered by link; what storage has lost of it, by what it tells
and by what it answers when it is asked, is written again when its path is used again.
A path that waits is named by the last copy on it, since nodes may be cut and joined meanwhile.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

from phloem.cache import PrefixCache
from phloem.cache.components import ABSENT
from phloem.cache.node import Node
from phloem.cache.window_host import WindowHost
from phloem.core.transfer import TransferKind, TransferResult
from phloem.tiers.flights import Flights
from phloem.tiers.keys import Links
from phloem.tiers.window_path import WindowPath
from phloem.tiers.writes import path_tokens

__all__ = ["WindowWrites"]

PAGES_PER_TRANSFER = 64
MAX_IN_FLIGHT = 4  # one of a path at a time: it fails, and is tried again, as one
MAX_TRIES = 8
MAX_REMEMBERED = 1 << 18  # pages; what is forgotten is written again


class WindowWrites:
    """Decides and follows BACKUP_STORAGE transfers of the window component."""

    def __init__(
        self,
        cache: PrefixCache,
        host: WindowHost,
        flights: Flights,
        links: Links,
        deadline_s: Callable[[], float],
    ) -> None:
        assert cache.state.window is not None, "the cache has no windows"
        self._tree = cache.leader.tree
        self._homes = cache.state.window.host_home
        self._host = host
        self._flights = flights
        self._links = links
        self._deadline_s = deadline_s
        self._stored: OrderedDict[bytes, None] = OrderedDict()  # links
        self.has_losses = False  # something that was stored is not any more
        self._queue: deque[int] = deque()  # slots; the copies on the paths to them are to be stored
        self._queued: set[int] = set()
        self._tries: Counter[int] = Counter()
        self._busy: set[bytes] = set()  # links of what is being written
        self._num_in_flight = 0
        self.dropped: Counter[str] = Counter()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def wants(self, slot: int) -> None:
        """A copy, and those above it on its path, are to be in storage."""
        if slot not in self._queued:
            self._queued.add(slot)
            self._queue.append(slot)

    def wants_all(self) -> None:
        """The same of every path: there is a storage that may have nothing."""
        for node in self._tree.nodes.values():
            slots = node.extra[0].host_list() if node.extra else []
            for slot in [slot for slot in slots if slot != ABSENT][-1:]:
                self.wants(slot)

    def forget(self) -> None:
        """There is another storage now, or none."""
        self._queue.clear()
        self._queued.clear()
        self._tries.clear()
        self._stored.clear()
        self.has_losses = False

    def are_stored(self, links: Iterable[bytes]) -> None:
        """Storage has these."""
        for link in links:
            self._stored[link] = None
            self._stored.move_to_end(link)
        while len(self._stored) > MAX_REMEMBERED:
            self._stored.popitem(last=False)

    def are_lost(self, links: Iterable[bytes]) -> None:
        """Storage does not have these, whatever was known."""
        for link in links:
            if link in self._stored:
                del self._stored[link]
                self.has_losses = True

    def all_may_be_lost(self) -> None:
        """Storage has lost more than it could name."""
        self._stored.clear()
        self.has_losses = True

    def pump(self) -> None:
        """Start what can be started now."""
        for _ in range(len(self._queue)):
            if self._num_in_flight >= MAX_IN_FLIGHT:
                return
            last = self._queue.popleft()
            self._queued.discard(last)
            node = self._homes.get(last)
            if node is None:
                self._tries.pop(last, None)
                self.dropped["window_left_before_stored"] += 1
            elif not node.detached:
                self._start(last, node)

    def _start(self, last: int, node: Node) -> None:
        path = WindowPath.down_to(node, node.extra[0].host_list().index(last) + 1)
        links = self._links.of(node.namespace, path_tokens(node))
        slots = path.slots.tolist()
        missing = [
            page
            for page in path.on_host.nonzero()[0].tolist()
            if links[page] not in self._stored and links[page] not in self._busy
        ]
        if missing:
            now = missing[:PAGES_PER_TRANSFER]
            held = array("q", [slots[page] for page in now]).tobytes()
            names = tuple(links[page] for page in now)
            self._submit(last, held, names, len(missing) - len(now))

    def _submit(self, last: int, held: bytes, names: tuple[bytes, ...], num_left: int) -> None:
        self._host.hold(held)
        self._busy.update(names)
        self._num_in_flight += 1

        def on_end(result: TransferResult) -> None:
            self._host.release(held)
            self._busy.difference_update(names)
            self._num_in_flight -= 1
            self._ended(last, names, result, num_left)

        self._flights.submit(
            TransferKind.BACKUP_STORAGE,
            on_end,
            component=1,
            host=held,
            links=names,
            deadline_s=self._deadline_s(),
        )

    def _ended(
        self, last: int, names: tuple[bytes, ...], result: TransferResult, num_left: int
    ) -> None:
        self.are_stored(link for link, done in zip(names, result.done, strict=True) if done)
        failed = len(names) - int(result.done.sum())
        if not failed:
            self._tries.pop(last, None)
            if num_left:
                self.wants(last)
            return
        self._tries[last] += 1
        if self._tries[last] >= MAX_TRIES:
            del self._tries[last]
            self.dropped["window_storage_failed"] += failed + num_left
        else:
            self.wants(last)
