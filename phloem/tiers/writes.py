"""Host to storage: every page that has arrived on the host, its ancestors first.

A page without its ancestors is of no use to anybody, so what a page's path lacks is fetched to the
host and written before it. A failed write is tried again a few times, then dropped and counted.

Storage loses pages by its own eviction, and says which. What it has lost is written again when it
is used again or comes to the host again, and not before: else a store that is smaller than the
host would be written for ever.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from phloem.cache import PrefixCache
from phloem.cache.node import Node
from phloem.core.store import Gone
from phloem.core.transfer import TransferKind, TransferResult
from phloem.kv.keys import LINK_BYTES
from phloem.tiers.flights import Flights
from phloem.tiers.keys import Links

__all__ = ["StorageWrites"]

PAGES_PER_TRANSFER = 64  # whole nodes: the last one may exceed it
MAX_IN_FLIGHT = 4
MAX_TRIES = 8
MAX_LOST = 1 << 17  # lost pages remembered; with more, nothing is known to be stored any more


class StorageWrites:
    """Decides and follows BACKUP_STORAGE transfers.

    `copy_first(node)` asks for a host copy of a node that lacks one.
    """

    def __init__(
        self,
        cache: PrefixCache,
        flights: Flights,
        links: Links,
        *,
        copy_first: Callable[[Node], None],
        deadline_s: Callable[[], float],
    ) -> None:
        self._leader = cache.leader
        self._tree = cache.leader.tree
        self._flights = flights
        self._links = links
        self._copy_first = copy_first
        self._lost: set[bytes] = set()  # links
        self._deadline_s = deadline_s
        self._queue: deque[int] = deque()
        self._queued: dict[int, int] = {}  # ids of nodes in the queue, and their pages
        self._tries: dict[int, int] = {}
        self._busy: set[int] = set()  # slots that are read: nodes may be joined or cut meanwhile
        self._blocked_at = -1
        self.dropped: Counter[str] = Counter()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def wants(self, node: Node) -> None:
        """The path down to `node` is to be in storage."""
        if not node.stored and node.id not in self._queued:
            self._queued[node.id] = node.num_pages
            self._queue.append(node.id)

    def lost(self, gone: Gone) -> None:
        """Storage has lost these objects."""
        if gone.overflowed or len(self._lost) > MAX_LOST:
            self._lost.clear()
            self._leader.host.forget_stored()
        self._lost.update(key[:LINK_BYTES] for key in gone.keys)

    def has(self, node: Node) -> bool:
        """Whether storage has a node, as far as it has told."""
        if node.stored:
            self._unmark_lost(path_nodes(node))
        return node.stored

    def arrived(self, node: Node) -> None:
        """Pages have come to the host: the path down to them is to be in storage."""
        self._unmark_lost(path_nodes(node))
        self.wants(node)

    def used(self, node: Node) -> None:
        """A request has used the path down to `node`: what storage has lost of it is wanted.

        What is on the device alone comes to the host when the policy says so, and then here.
        """
        path = path_nodes(node)
        self._unmark_lost(path)
        for step in path:
            if step.host:
                self.wants(step)

    def _unmark_lost(self, path: list[Node]) -> None:
        """Nodes of a path, root first, of which storage has lost pages are not stored any more."""
        if not self._lost or not any(step.stored for step in path):
            return
        tokens = b"".join(step.key for step in path)
        links = self._links.of(path[-1].namespace, tokens)
        start = 0
        for step in path:
            end = start + step.num_pages
            if step.stored and not self._lost.isdisjoint(links[start:end]):
                self._leader.host.unmark_stored(step)
            start = end

    def forget(self) -> None:
        """There is another storage now, or none."""
        self._lost.clear()
        self._queue.clear()
        self._queued.clear()
        self._tries.clear()
        self._leader.host.forget_stored()

    def pump(self) -> None:
        """Start what can be started now."""
        if len(self._flights) and self._flights.num_ended == self._blocked_at:
            return
        self._blocked_at = -1
        for _ in range(len(self._queue)):
            if self._flights.count[TransferKind.BACKUP_STORAGE] >= MAX_IN_FLIGHT:
                return
            node_id = self._queue.popleft()
            self._start(node_id, self._queued.pop(node_id))

    def _start(self, node_id: int, num_pages: int) -> None:
        node = self._tree.nodes.get(node_id)
        if node is None or node.detached:
            self._tries.pop(node_id, None)
            if node is None:
                self.dropped["left_before_stored"] += num_pages
            return
        run = self._run(node)
        if not run:
            self._tries.pop(node_id, None)
            return
        if not all(self._busy.isdisjoint(step.host_list()) for step in run):
            self._wait_for_transfers(node)
            return
        ready = self._ready(run)
        if ready:
            self._submit(node, ready)
            return
        self._copy_first(run[-1])
        self._try_again(node, run, "no_host_copy")

    def _run(self, node: Node) -> list[Node]:
        """The nodes of the path, lowest first, that are not in storage."""
        run: list[Node] = []
        step: Node | None = node
        while step is not None and step.parent is not None and not step.stored:
            run.append(step)
            step = step.parent
        return run

    def _ready(self, run: list[Node]) -> list[Node]:
        """The uppermost nodes of a run that are on the host, a transfer's worth; root first."""
        out: list[Node] = []
        pages = 0
        for step in reversed(run):
            if not step.host:
                break
            out.append(step)
            pages += step.num_pages
            if pages >= PAGES_PER_TRANSFER:
                break
        return out

    def _submit(self, wanted: Node, nodes: list[Node]) -> None:
        end = nodes[-1]
        slots = b"".join(node.host for node in nodes)
        count = sum(node.num_pages for node in nodes)
        links = self._links.of(end.namespace, path_tokens(end))[-count:]
        busy = [slot for node in nodes for slot in node.host_list()]
        self._busy.update(busy)
        self._leader.host.hold(slots)

        def on_end(result: TransferResult) -> None:
            self._leader.host.release(slots)
            self._busy.difference_update(busy)
            ok = bool(result.done.all())
            if ok:
                self._lost.difference_update(links)
            self._ended(wanted, end, count, ok=ok)

        self._flights.submit(
            TransferKind.BACKUP_STORAGE,
            on_end,
            host=slots,
            links=tuple(links),
            deadline_s=self._deadline_s(),
        )

    def _ended(self, wanted: Node, end: Node, num_pages: int, *, ok: bool) -> None:
        alive = self._tree.nodes.get(end.id) is end and not end.detached
        if ok and alive:
            self._tries.pop(wanted.id, None)
            self._leader.host.mark_stored(end, num_pages)
            self._give_up_copies(covered_nodes(end, num_pages))
        if self._tree.nodes.get(wanted.id) is not wanted:
            return
        if not ok:
            self._try_again(wanted, [end], "storage_failed")
        elif not wanted.stored:
            self.wants(wanted)

    def _try_again(self, node: Node, run: list[Node], reason: str) -> None:
        tries = self._tries.get(node.id, 0) + 1
        if tries >= MAX_TRIES:
            self._tries.pop(node.id, None)
            self.dropped[reason] += sum(step.num_pages for step in run)
            self._give_up_copies(run)
            return
        self._tries[node.id] = tries
        self._wait_for_transfers(node)

    def _give_up_copies(self, nodes: list[Node]) -> None:
        """A small host has no room for copies of what is on the device."""
        if self._leader.host.exclusive:
            for node in nodes:
                alive = self._tree.nodes.get(node.id) is node  # not joined to another meanwhile
                if alive and node.refs and node.host:
                    self._leader.host.drop_duplicate(node)

    def _wait_for_transfers(self, node: Node) -> None:
        self._blocked_at = self._flights.num_ended
        self.wants(node)


def covered_nodes(node: Node, num_pages: int) -> list[Node]:
    """The nodes from `node` upwards that lie within the last `num_pages` pages, whole ones."""
    out: list[Node] = []
    step: Node | None = node
    while step is not None and step.parent is not None and step.num_pages <= num_pages:
        out.append(step)
        num_pages -= step.num_pages
        step = step.parent
    return out


def path_nodes(node: Node) -> list[Node]:
    """The nodes from below the root to `node`."""
    out: list[Node] = []
    step: Node | None = node
    while step is not None and step.parent is not None:
        out.append(step)
        step = step.parent
    out.reverse()
    return out


def path_tokens(node: Node) -> bytes:
    """All tokens from the beginning of the prompt to the end of the node."""
    return b"".join(step.key for step in path_nodes(node))
