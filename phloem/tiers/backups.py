"""Device to host: which pages are copied, and when.

    write_through             when a request has computed its prompt, and when it ends
    write_through_selective   when a request ends, for pages that will be used again (see `reuse`)
    write_back                when they are about to leave the device
    (a small host)            also then, whatever the policy: see `config.is_exclusive`; with
                              storage, write_through passes pages through it at once all the same

Pages that are about to leave are copied first and leave when they have arrived; who needs the room
waits for it. What cannot be copied is tried again a few times, then dropped and counted by reason.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from phloem.cache import Match, PrefixCache
from phloem.cache.host_ledger import Backup
from phloem.cache.node import Node
from phloem.cache.residence import covered
from phloem.core.transfer import TransferKind, TransferResult
from phloem.tiers.config import TierConfig
from phloem.tiers.flights import Flights
from phloem.tiers.reuse import Reuse

__all__ = ["HostBackups"]

MAX_PAGES = 64  # of one transfer
MAX_TRIES = 4
MAX_HOPELESS = 1024  # then those that are gone are forgotten
STARTS_PER_PASS = 32
LOW_WATER = 16  # with late copies one sixteenth of the device is kept free ahead, at most:
MOST_LOW_WATER = 64


class HostBackups:
    """Decides and follows BACKUP_HOST transfers.

    `on_backed_up(node, pages)` hears of pages that have arrived on the host, parents first;
    `is_congested()`: storage has enough to write, and a small host should take no more for it;
    `is_stored(node)`: storage has it, as far as it has told.
    """

    def __init__(
        self,
        cache: PrefixCache,
        flights: Flights,
        config: TierConfig,
        reuse: Reuse,
        on_backed_up: Callable[[Node, int], None],
        is_congested: Callable[[], bool],
        is_stored: Callable[[Node], bool],
    ) -> None:
        self._leader = cache.leader
        self._tree = cache.leader.tree
        self._cache = cache
        self._flights = flights
        self._reuse = reuse
        self._worth: dict[int, int] = {}  # selective: pages of a queued path that want a copy
        self._on_backed_up = on_backed_up
        self._is_congested = is_congested
        self._is_stored = is_stored
        host = cache.leader.host
        self.late = config.write_policy == "write_back" or host.exclusive
        # So small a host is worth more for what comes and goes than for what storage has.
        self._is_stage = host.capacity < cache.total_pages
        self._leader.evicts_for_placement = not self.late
        self._through = config.write_policy != "write_back"
        self.to_storage = False  # there is a storage tier behind the host
        self._selective = config.write_policy == "write_through_selective"
        self._max_pages = max(1, min(MAX_PAGES, host.capacity // 4))
        self._low_water = min(MOST_LOW_WATER, cache.total_pages // LOW_WATER) if self.late else 0
        self._queue: deque[int] = deque()  # ids of nodes, the paths to which want copies
        self._queued: set[int] = set()
        self._tries: dict[int, int] = {}
        self._busy: set[int] = set()  # ids of nodes in a transfer
        self._hopeless: set[int] = set()  # ids of nodes whose copy failed: they leave without one
        self._blocked_at = -1  # transfers that had ended when the host had no room
        self._leaving: dict[Backup, int] = {}  # pages that leave the device when they have arrived
        self.dropped: Counter[str] = Counter()  # pages by reason

    @property
    def copies_at_once(self) -> bool:
        """Pages are copied when they are there, not when they leave."""
        return not self.late or (self._through and self.to_storage)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def used(self, node: Node, *, ended: bool) -> None:
        """A request has computed its prompt, or has `ended`: the path down to `node` is in use."""
        if self._selective:
            if not ended:
                return
            worth = self._reuse.note(node)
            if self.copies_at_once:
                self._worth[node.id] = worth
        if self.copies_at_once:
            self._enqueue(node.id)

    def pump(self) -> None:
        """Start what can be started now."""
        if len(self._hopeless) > MAX_HOPELESS:
            self._hopeless.intersection_update(self._tree.nodes)
        if self._low_water and self._leader.state.free_pages < self._low_water:
            self._start_leaving(self._low_water - self._leader.state.free_pages)
        if len(self._flights) and self._flights.num_ended == self._blocked_at:
            return  # nothing has changed since there was no room
        self._blocked_at = -1
        if self.late and self._is_congested():
            return
        for _ in range(min(STARTS_PER_PASS, len(self._queue))):
            node_id = self._queue.popleft()
            self._queued.discard(node_id)
            if not self._start(node_id):
                break

    def make_room(self, num_pages: int, match: Match) -> bool:
        """See that `num_pages` pages can be had without losing any that ought to be copied first.

        False: pages are being copied; ask again when some transfer has ended.
        """
        missing = num_pages - self._leader.state.free_pages
        if missing <= 0 or not self.late:
            return True
        self._leader.touch(match.node)
        return not self._start_leaving(missing)

    def copy(self, node: Node) -> None:
        """Copy the path down to `node` as soon as can be, whatever the policy says of when."""
        self._enqueue(node.id)

    def without_copy(self) -> list[Node]:
        """Every device node that wants a copy below and has none, parents first."""
        nodes = [
            node
            for node in self._tree.nodes.values()
            if node.refs and not (node.host or node.stored or node.detached)
        ]
        if self._selective:
            nodes = [node for node in nodes if self._reuse.is_hot(node)]
        return sorted(nodes, key=lambda node: (self._depth(node), node.id))

    def _depth(self, node: Node) -> int:
        depth = 0
        step = node.parent
        while step is not None:
            depth += 1
            step = step.parent
        return depth

    def _enqueue(self, node_id: int) -> None:
        if node_id not in self._queued:
            self._queued.add(node_id)
            self._queue.append(node_id)

    # Copies as soon as pages are there.

    def _start(self, node_id: int) -> bool:
        """Begin the uppermost missing copies of a path; False if the host has no room now."""
        node = self._tree.nodes.get(node_id)
        if node is None or node.detached:
            self._tries.pop(node_id, None)
            self._worth.pop(node_id, None)
            return True  # evicted before its turn: counted as unbacked where it was evicted
        run = self._run(node)
        missing = sum(step.num_pages for step in run)
        wanted = missing - self._num_unwanted(run[0], self._worth.get(node.id)) if run else 0
        if wanted <= 0:
            self._tries.pop(node_id, None)
            self._worth.pop(node_id, None)
            return True
        count = min(wanted, self._max_pages)
        backup = self._leader.begin_backup(run[0], count, skip=missing - count)
        if backup is None:
            self._try_again(node_id, wanted, "host_full")
            self._blocked_at = self._flights.num_ended
            return False
        self._submit(backup, leaving=False, then=node_id)
        if count < wanted:
            self._enqueue(node_id)
        return True

    def _num_unwanted(self, node: Node, worth: int | None) -> int:
        """Pages at the end of the path to `node` that are not worth a copy: the first `worth` are,
        None: all."""
        if worth is None:
            return 0
        length = 0
        step: Node | None = node
        while step is not None:
            length += step.num_pages
            step = step.parent
        return max(0, length - worth)

    def _run(self, node: Node) -> list[Node]:
        """The nodes of the path, lowest first, that want a copy: consecutive ones, the uppermost.

        An exclusive host passes pages on to storage: what is there wants none, but above it there
        may be what storage has lost, without which it is of no use.
        """
        run: list[Node] = []
        below: list[Node] = []
        step: Node | None = node
        while step is not None and step.parent is not None:
            if step.host or step.id in self._busy:
                break
            if self.late and step.stored:
                run, below = [], run or below
            elif step.refs:
                run.append(step)
            step = step.parent
        return run or below

    def _try_again(self, node_id: int, num_pages: int, reason: str) -> None:
        tries = self._tries.get(node_id, 0) + 1
        if tries >= MAX_TRIES:
            self._tries.pop(node_id, None)
            self.dropped[reason] += num_pages
            return
        self._tries[node_id] = tries
        self._enqueue(node_id)

    # Copies of what is about to leave.

    def _start_leaving(self, num_pages: int) -> bool:
        """Copy the next victims, up to `num_pages`; True if some of them are under way."""
        num_pages -= sum(self._leaving.values())
        for node, pages in self._leader.policy.victims(num_pages) if num_pages > 0 else ():
            cold = self._selective and not self._reuse.is_hot(node)
            is_safe = node.host or (self._is_stage and self._is_stored(node))
            if not (is_safe or cold or node.id in self._hopeless):
                self._start_leaving_tail(node, pages)
        return bool(self._leaving)

    def _start_leaving_tail(self, node: Node, num_pages: int) -> None:
        while num_pages > 0:
            count = min(num_pages, self._max_pages)
            backup = self._leader.begin_backup(node, count)
            if backup is None:
                self._hopeless.add(node.id)
                self.dropped["host_full"] += num_pages
                return
            self._submit(backup, leaving=True, then=node.id)
            num_pages -= count
            assert backup.node.parent is not None, f"{backup.node} is not in the tree"
            node = backup.node.parent  # what was cut off above it, if anything is left

    def _submit(self, backup: Backup, *, leaving: bool, then: int) -> None:
        if leaving:
            self._leaving[backup] = backup.num_pages
        ids = {node.id for node in covered(self._tree, backup.node, backup.num_pages)}
        self._busy |= ids

        def on_end(result: TransferResult) -> None:
            self._leaving.pop(backup, None)
            self._busy.difference_update(ids)
            self._ended(backup, bool(result.done.all()), leaving=leaving, then=then)

        self._flights.submit(
            TransferKind.BACKUP_HOST, on_end, device=backup.refs, host=backup.slots
        )

    def _ended(self, backup: Backup, done: bool, *, leaving: bool, then: int) -> None:
        node, num_pages = backup.node, backup.num_pages
        self._leader.end_backup(backup, done=done, demote=leaving)
        if not done and leaving:
            self._hopeless.add(node.id)
            self.dropped["copy_failed"] += num_pages
        elif not done:
            self._try_again(then, num_pages, "copy_failed")
        elif not node.detached:
            self._tries.pop(then, None)
            self._on_backed_up(node, num_pages)
