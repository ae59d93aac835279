"""Device to host, window state: whole tails, as soon as they are there, under every policy.

Window state leaves the device when a request has moved past it, or when a small pool wants the
room: long before its full pages do. So a tail is copied when a prompt has been computed and when a
request ends, also by `write_back`: then a prefix whose full pages are still on the device can be
gone on from after a load of one tail.

    path    0 ...... [tail] ............ [tail] ...... [T pages] end
                      of a branch point   of an end     of this end
                      or checkpoint:      before it:    copied
                      copied              copied then

A page is named by its ref: the nodes around it may be cut and joined while it waits.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable

from phloem.cache import PrefixCache
from phloem.cache.node import Node
from phloem.cache.window_host import WindowHost
from phloem.core.transfer import TransferKind, TransferResult
from phloem.tiers.flights import Flights
from phloem.tiers.window_path import WindowPath

__all__ = ["WindowBackups"]

MAX_PAGES = 64  # of one transfer
MAX_TRIES = 4
STARTS_PER_PASS = 32


class WindowBackups:
    """Decides and follows BACKUP_HOST transfers of the window component.

    `on_backed_up(slot)`: a copy, and what lies above it on its path, has arrived on the host.
    """

    def __init__(
        self,
        cache: PrefixCache,
        host: WindowHost,
        flights: Flights,
        on_backed_up: Callable[[int], None],
    ) -> None:
        ledger = cache.leader.window
        assert ledger is not None, "the cache has no windows"
        self._ledger = ledger
        self._host = host
        self._flights = flights
        self._on_backed_up = on_backed_up
        self._max_pages = max(1, min(MAX_PAGES, host.capacity // 4))
        self._queue: deque[int] = deque()  # pages; the tails of the paths to them want copies
        self._queued: set[int] = set()
        self._tries: Counter[int] = Counter()
        self._busy: set[int] = set()  # pages in a transfer
        self._blocked_at = -1  # transfers that had ended when the host had no room
        self.dropped: Counter[str] = Counter()  # pages by reason

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def used(self, node: Node) -> None:
        """A request has computed its prompt, or has ended: soon its tail may be gone."""
        missing = self._missing(WindowPath.down_to(node))
        if missing:
            self._start(missing[-1])

    def pump(self) -> None:
        """Start what can be started now."""
        if len(self._flights) and self._flights.num_ended == self._blocked_at:
            return  # nothing has changed since there was no room
        self._blocked_at = -1
        for _ in range(min(STARTS_PER_PASS, len(self._queue))):
            last = self._queue.popleft()
            self._queued.discard(last)
            if not self._start(last):
                break

    def _start(self, last: int) -> bool:
        """Begin the next copies of the path to a page; False if the host has no room now."""
        node = self._ledger.state.home.get(last)
        if node is None or node.detached:
            self._tries.pop(last, None)
            self.dropped["window_left_before_copied"] += node is None
            return True
        missing = self._missing(WindowPath.down_to(node, node.extra[0].ref_list().index(last) + 1))
        pages = [page for page in missing if page not in self._busy][: self._max_pages]
        if not pages:
            self._tries.pop(last, None)
            return True  # all there, or in a transfer, at whose end it is looked at again
        backup = self._host.begin_backup(self._ledger.state.home[pages[-1]], pages)
        if backup is None:
            self._try_again(last, len(missing), "window_host_full")
            self._blocked_at = self._flights.num_ended
            return False
        self._busy.update(pages)

        def on_end(result: TransferResult) -> None:
            self._busy.difference_update(pages)
            done = bool(result.done.all())
            self._host.end_backup(backup, done=done)
            if done:
                self._on_backed_up(backup.window_slots[-1])
                self._enqueue(last)
            else:
                self._try_again(last, len(pages), "window_copy_failed")

        self._flights.submit(
            TransferKind.BACKUP_HOST,
            on_end,
            component=1,
            device=array("q", pages).tobytes(),
            host=array("q", backup.window_slots).tobytes(),
        )
        return True

    def _missing(self, path: WindowPath) -> list[int]:
        """Pages of the path's tails that have no copy, in order.

        Of tails inside the path only those count that others go on from, or that are kept every so
        many tokens; but a repeat of the prompt goes on one page before an end on a page's border.
        """
        refs, end = path.refs.tolist(), len(path)
        wanted: set[int] = set()
        for page in (path.refs >= 0).nonzero()[0].tolist():
            tail = self._ledger.tails.ending_at(refs[page])
            if tail is not None and (not tail.passed or page >= end - 2):
                wanted.update(tail.pages)
        copied = path.on_host.tolist()
        return [ref for ref, there in zip(refs, copied, strict=True) if ref in wanted and not there]

    def _enqueue(self, last: int) -> None:
        if last not in self._queued:
            self._queued.add(last)
            self._queue.append(last)

    def _try_again(self, last: int, num_pages: int, reason: str) -> None:
        self._tries[last] += 1
        if self._tries[last] >= MAX_TRIES:
            del self._tries[last]
            self.dropped[reason] += num_pages
            return
        self._enqueue(last)
