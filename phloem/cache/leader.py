"""The leader: turns wishes into commands, and is the only one who decides anything.

`Leader` knows the eviction policy, the ghosts and the placement; `CacheState` knows none of them.
"""

from __future__ import annotations

from typing import cast

from phloem.cache.ages import Ages
from phloem.cache.chain import KEY_BYTES
from phloem.cache.components import ABSENT
from phloem.cache.eviction import EvictionPolicy
from phloem.cache.ghosts import Ghosts
from phloem.cache.host_ledger import Backup, HostLedger
from phloem.cache.match import Match
from phloem.cache.node import REF_BYTES, Node
from phloem.cache.placement import PlacementPolicy, num_displaced, take_pages
from phloem.cache.replica_ledger import ReplicaLedger
from phloem.cache.replica_policy import ReplicaConfig
from phloem.cache.reservation import Reservation
from phloem.cache.residence import covered
from phloem.cache.state import CacheState
from phloem.cache.window import WindowConfig
from phloem.cache.window_eviction import path_end
from phloem.cache.window_host import WindowHost
from phloem.cache.window_ledger import WindowLedger
from phloem.core.errors import NoRoom
from phloem.core.tokens import TOKEN_BYTES
from phloem.replica import CommandLog, commands

__all__ = ["Leader"]

# A leaf is lengthened in place while that copies little; what grows beyond is joined at close.
APPEND_BYTES = 16 * 1024
JOIN_RATIO = 16
JOIN_STEPS = 16  # nodes looked at per close; the rest is for later ones


class Leader:
    """Decides, writes commands, and keeps the policy told. One per cache."""

    __slots__ = (
        "_freed",
        "ages",
        "backups",
        "demoted_pages",
        "ends",
        "evicted_pages",
        "evicts_for_placement",
        "ghosts",
        "host",
        "log",
        "page_size",
        "placement",
        "policy",
        "record_freed",
        "replicas",
        "reservations",
        "state",
        "tree",
        "unbacked_pages",
        "window",
        "window_host",
    )

    def __init__(
        self,
        state: CacheState,
        *,
        policy: EvictionPolicy,
        placement: PlacementPolicy,
        ghosts: Ghosts,
        record_freed: bool,
        exclusive_host: bool = False,
        window: WindowConfig | None = None,
    ) -> None:
        self.state = state
        self.tree = state.tree
        self.page_size = state.tree.page_bytes // TOKEN_BYTES
        self.log = CommandLog(state)
        self.policy = policy
        self.placement = placement
        self.ends = [0] * len(state.allocators)  # running requests by the owner of their last page
        self.evicts_for_placement = True  # not where what leaves the device must be copied first
        self.ghosts = ghosts
        self.record_freed = record_freed
        self.evicted_pages = 0  # from the device
        self.demoted_pages = 0  # of these: they stay on the host
        self.unbacked_pages = 0  # of these: lost although there is a host tier
        self.host = HostLedger(state, self.log, ghosts, exclusive=exclusive_host)
        self.window: WindowLedger | None = None
        self.window_host: WindowHost | None = None
        if window is not None:
            self.window = WindowLedger(state, self.log, window, record_freed)
            self.window_host = WindowHost(self)
        self.replicas: ReplicaLedger | None = None
        self.reservations: set[Reservation] = set()  # open now; never iterated to decide anything
        self.ages: Ages | None = None  # set by who has a clock
        self.backups: set[Backup] = set()  # in flight; never iterated to decide anything
        self._freed: list[bytes] = []

    def keep_replicas(self, config: ReplicaConfig) -> None:
        """From now on pages that other ranks read often are copied to them."""
        self.replicas = ReplicaLedger(self.state, self.log, config, self._note_freed)

    def note_hit(self, match: Match, load_pages: int, ages: Ages) -> None:
        """For the ages: what matched is used."""
        if match.num_pages:
            ages.happened("hit", "device", match.node.last_access, match.num_pages)
        if load_pages and match.host_node is not None:
            ages.happened("hit", "host", match.host_node.last_access, load_pages)

    def recall(self, match: Match) -> None:
        """Count the pages right after the match that were cached once."""
        tree = self.tree
        node, pages, known = match.path_end()
        start = known * tree.page_bytes
        if start < match.end:
            key = tree.chain_key(node, pages, match.namespace)
            self.ghosts.recall(tree.hasher, key, match.tokens, start, match.end, tree.page_bytes)

    @property
    def evictable_pages(self) -> int:
        """Pages in the tree that nobody locks: all of them can be had, leaf by leaf."""
        return self.tree.total_pages - self.tree.locked_pages

    def unlocked_on_path(self, match: Match) -> int:
        """How many evictable pages a lock on the match would take away."""
        node, pages, total = match.node, match.node_pages, 0
        while not node.locks and node.parent is not None:
            total += pages
            node = node.parent
            pages = len(node.refs) // REF_BYTES
        return total

    def allocate(self, num_pages: int, last: int | None = None) -> bytes:
        """Take pages, evicting as many as are missing. Raises NoRoom and changes nothing else.

        `last`: the owner of the page that they come after, if the request has taken it before.
        What goes was used longest ago, on whatever rank: each page is sent to one with room.
        """
        missing = num_pages - self.state.free_pages
        if missing > 0:
            evictable = self.evictable_pages
            if missing > evictable:
                raise NoRoom(
                    f"{num_pages} pages asked, {num_pages - missing} free and {evictable} evictable"
                )
            self.evict(missing)
        if len(self.state.allocators) == 1:
            return self._take(0, num_pages)
        return self._take_placed(num_pages, last)

    def _take_placed(self, num_pages: int, last: int | None) -> bytes:
        """As the policy wants them placed: it may evict more for that, up to a price."""
        policy = self.placement
        price = policy.price(num_pages) if self.evicts_for_placement else 0
        free = self.state.room()
        start = policy.start(num_pages, free, self.ends, last)
        while price and (missing := num_displaced(num_pages, free, start, policy.step)):
            evicted = self.evict(min(price, missing))
            if not evicted:
                break
            price -= evicted
            free = self.state.room()
        return take_pages(num_pages, free, start, policy.step, self._take)

    def _take(self, owner: int, num_pages: int) -> bytes:
        if self.replicas is not None:
            self.replicas.make_room(owner, num_pages)
        refs = cast(bytes, self.log.append(commands.alloc(owner, num_pages)))
        if self.replicas is not None:
            self.replicas.taken(refs)
        return refs

    def evict(self, num_pages: int) -> int:
        """Evict up to `num_pages` unlocked pages; returns how many."""
        refs, keys = self._drop(num_pages)
        self.ghosts.remember(keys)
        num_evicted = len(refs) // REF_BYTES
        self.evicted_pages += num_evicted
        if self.host.capacity:
            self.unbacked_pages += len(keys) // KEY_BYTES
        return num_evicted

    def free(self, refs: bytes) -> None:
        """Give back pages that are not in the tree."""
        self.log.append(commands.free(refs))
        self._note_freed(refs)

    def take_freed(self) -> bytes:
        """Packed refs of all pages freed since the last call, if they are recorded."""
        freed = b"".join(self._freed)
        self._freed.clear()
        return freed

    def lock(self, node: Node, above: Node) -> None:
        """Lock the path from `node` up to, without, `above`."""
        fresh = self.log.append((commands.LOCK, node.id, above.id))  # `commands.lock`, inline
        if fresh:
            self.policy.locked(fresh)

    def unlock(self, node: Node) -> None:
        """Unlock the path from `node` to the root, then join the private runs on it."""
        idle, refs = self.log.append(commands.unlock(node.id))
        if idle:
            self.policy.unlocked(idle)
        if refs:
            self._note_freed(refs)
        if not node.detached and node.parent is not self.tree.root:
            self._join(node)

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut a node in two; returns the upper one."""
        upper = cast(Node, self.log.append(commands.split(node.id, num_pages)))
        if not upper.refs:
            self.host.was_split(upper, node)
        elif not upper.locks:
            self.policy.unlocked((upper,))
        return upper

    def grow(self, node: Node, namespace: bytes, tokens: bytes, refs: bytes) -> Node:
        """Add pages after `node`, which the caller locks. Returns where its lock is now."""
        if (
            node.locks == 1
            and not node.children
            and not node.host
            and not node.stored
            and len(node.key) <= max(APPEND_BYTES, len(tokens))
            and node is not self.tree.root
        ):
            command = commands.append(node.id, tokens, refs)
        else:
            command = commands.insert(node.id, namespace, tokens, refs)
        end = ABSENT if self.window is None else path_end(node)
        grown = cast("Node | None", self.log.append(command))
        if end != ABSENT and self.window is not None:
            self.window.tails.go_on(end)
        return grown or node

    def adopt(self, node: Node, refs: bytes) -> None:
        """A request's own pages are those of `node`, which was on the host alone."""
        self.host.adopt(node, refs)
        end = ABSENT if self.window is None or node.parent is None else path_end(node.parent)
        if end != ABSENT and self.window is not None:
            self.window.tails.go_on(end)

    def flush(self) -> int:
        """Drop all that can be, make the rest unfindable; returns the pages still in use."""
        if self.tree.host_pages:
            self.host.forget_all()
        self._drop(self.evictable_pages)
        if self.window is not None and self.window_host is not None:
            self.window.forget()
            self.window_host.evict(self.window_host.capacity)
        self.ghosts.keys.clear()  # what is flushed did not go too early
        self.log.append(commands.detach())
        for reservation in self.reservations:
            reservation.stop_sharing()
        return sum(a.capacity for a in self.state.allocators) - self.state.free_pages

    def touch(self, node: Node) -> None:
        """The path down to `node` is used: what of it nobody locks goes last."""
        step: Node | None = node
        while step is not None and step.parent is not None and step.refs and not step.locks:
            self.policy.locked((step,))
            self.policy.unlocked((step,))
            step = step.parent

    def begin_backup(self, node: Node, num_pages: int, *, skip: int = 0) -> Backup | None:
        """Lock `num_pages` pages, and find them slots on the host.

        They are the last ones on the path to `node` but for `skip` ones behind them. None, and
        nothing changed, if the host has no room.
        """
        slots = self.host.allocate(num_pages)
        if slots is None:
            return None
        node = self._cut_at(node, skip)
        self._cut_at(node, num_pages)
        refs = b"".join([n.refs for n in reversed(list(covered(self.tree, node, num_pages)))])
        self.lock(node, self.tree.root)
        backup = Backup(node=node, refs=refs, slots=slots)
        self.backups.add(backup)
        return backup

    def _cut_at(self, node: Node, num_pages: int) -> Node:
        """The node that ends `num_pages` pages above the end of `node`; cut one if need be.

        The caller locks it next: until then a cut leaves the order of eviction wrong.
        """
        while num_pages >= node.num_pages and node.parent is not None:
            num_pages -= node.num_pages
            node = node.parent
        return self.split(node, node.num_pages - num_pages) if num_pages else node

    def end_backup(self, backup: Backup, *, done: bool, demote: bool = False) -> None:
        """The copy has ended: the host copies count from now on, or their slots are free again.

        `demote`: then the pages leave the device, unless somebody locks them by now.
        """
        self.backups.discard(backup)
        node, left = backup.node, backup.num_pages
        self.host.end_backup(backup, done=done)
        self.unlock(node)
        while demote and done and left > 0 and self._may_demote(node):
            parent = node.parent
            assert parent is not None, "only the root has none, and it is never on the host"
            left -= node.num_pages
            self.policy.locked((node,))
            if self.ages is not None:
                self.ages.happened("evicted", "device", node.last_access, node.num_pages)
            self.evicted_pages += node.num_pages
            self.demoted_pages += node.num_pages
            ends = [] if self.window is None else self.window.leave([(node, node.num_pages)])
            self._note_freed(self.host.demote(node))
            if self.window is not None:
                self.window.turn_back(ends)
            node = parent

    def _may_demote(self, node: Node) -> bool:
        return (
            bool(node.host and node.refs)
            and not node.locks
            and not any(child.refs for child in node.children.values())
        )

    def _drop(self, num_pages: int) -> tuple[bytes, bytes]:
        """Free up to `num_pages` unlocked pages; returns their refs and lost content keys."""
        victims = self.policy.victims(num_pages)
        if not victims:
            return b"", b""
        if self.window is None:
            return self._drop_victims(victims)
        ends = self.window.leave(victims)
        gone = self._drop_victims(victims)
        self.window.turn_back(ends)
        return gone

    def _drop_victims(self, victims: list[tuple[Node, int]]) -> tuple[bytes, bytes]:
        if self.tree.host_pages:
            return self._drop_or_demote(victims)
        flat = [number for node, pages in victims for number in (node.id, pages)]
        refs, keys = self.log.append(commands.evict(tuple(flat)))
        gone = [node for node, _ in victims]
        if gone[-1].parent is not None:
            gone.pop()  # only its tail went
        self.policy.locked(gone)
        self._note_freed(refs)
        return refs, keys

    def _drop_or_demote(self, victims: list[tuple[Node, int]]) -> tuple[bytes, bytes]:
        all_refs, all_keys = [], []
        for node, pages in victims:
            if self.ages is not None:
                self.ages.happened("evicted", "device", node.last_access, pages)
            if pages < node.num_pages and node.host:
                upper = self.log.append(commands.split(node.id, node.num_pages - pages))
                self.policy.replaced(node, upper)
            elif pages == node.num_pages:
                self.policy.locked((node,))
            if node.host:
                refs = self.host.demote(node)
                self.demoted_pages += pages
            else:
                self.host.drop_below(node)
                refs, keys = self.log.append(commands.evict((node.id, pages)))
                all_keys.append(keys)
            all_refs.append(refs)
        gone = b"".join(all_refs)
        self._note_freed(gone)
        return gone, b"".join(all_keys)

    def _join(self, node: Node) -> None:
        # Only what the leaving request has walked: all of it is equally recent, so that one place
        # in the order of eviction stands for the whole run.
        steps = JOIN_STEPS
        upper: Node | None = node
        while upper is not None and upper.parent is not None and steps > 0:
            count = self.tree.run_above(upper, JOIN_RATIO)
            if count:
                gone = self.log.append(commands.merge(upper.id, count))
                if not upper.locks:
                    self.policy.locked(gone)
            steps -= 1 + count
            upper = upper.parent

    def _note_freed(self, refs: bytes) -> None:
        if self.record_freed:
            self._freed.append(refs)
