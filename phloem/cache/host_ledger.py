"""The leader's host side: which pages get, keep and lose a copy on the host.

    device page --begin_backup--> Backup --end_backup(done)--> on both tiers
                                         `-(failed)---------> as before, slots freed
    on both tiers --evicted from the device--> on the host alone --evicted--> gone

While a backup runs, its pages are locked on the device; whoever reads or writes host slots holds
them (see `replica.host_pool`), so eviction never waits for a transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from phloem.cache.ages import Ages
from phloem.cache.eviction import LruPolicy
from phloem.cache.ghosts import Ghosts
from phloem.cache.node import REF_BYTES, Node
from phloem.cache.residence import covered
from phloem.cache.state import CacheState
from phloem.replica import CommandLog, commands

__all__ = ["Backup", "HostLedger", "HostTier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """How many pages the host arena has; 0: there is no host tier.

    `exclusive`: a page that is loaded gives up its host copy (for a host that is small against
    the device, where duplicates would fill it).
    """

    pages: int = 0
    exclusive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Backup:
    """Device pages on their way to the host: those that end with `node`, root first.

    `window_pages` of them have window state that goes along, to `window_slots` of its own arena.
    """

    node: Node
    refs: bytes
    slots: bytes
    window_pages: tuple[int, ...] = ()
    window_slots: tuple[int, ...] = ()

    @property
    def num_pages(self) -> int:
        return len(self.slots) // REF_BYTES


class HostLedger:
    """Decides evictions of the host tier and writes its commands. One per leader."""

    __slots__ = (
        "_log",
        "_state",
        "_tree",
        "ages",
        "evicted_pages",
        "exclusive",
        "ghosts",
        "policy",
        "reserved",
        "waits_for_storage",
    )

    def __init__(
        self, state: CacheState, log: CommandLog, ghosts: Ghosts, *, exclusive: bool
    ) -> None:
        self._state = state
        self._tree = state.tree
        self._log = log
        self.ghosts = ghosts
        self.exclusive = exclusive
        self.policy = LruPolicy()  # of the nodes on the host alone
        self.evicted_pages = 0
        self.reserved: dict[bytes, None] = {}  # runs of slots that transfers own
        self.ages: Ages | None = None  # set by who has a clock
        self.waits_for_storage = False  # copies are still to be written to storage

    @property
    def capacity(self) -> int:
        return self._state.host.capacity

    @property
    def free_pages(self) -> int:
        return self._state.host.num_free

    # Slots.

    def allocate(self, num_pages: int) -> bytes | None:
        """Slots for a transfer to write to, evicting if need be; None if there is no room."""
        while self.free_pages < num_pages:
            missing = num_pages - self.free_pages
            if not self.evict(missing) and not self._drop_duplicates(missing):
                return None
        slots = cast(bytes, self._log.append(commands.host_alloc(num_pages)))
        self.reserved[slots] = None
        return slots

    def free(self, slots: bytes) -> None:
        """Give back what `allocate` gave."""
        del self.reserved[slots]
        self._log.append(commands.host_free(slots))

    def cut(self, slots: bytes, num_pages: int) -> tuple[bytes, bytes]:
        """Treat what one `allocate` gave as two runs from now on."""
        del self.reserved[slots]
        parts = slots[: num_pages * REF_BYTES], slots[num_pages * REF_BYTES :]
        self.reserved.update((part, None) for part in parts if part)
        return parts

    def hold(self, slots: bytes) -> None:
        if slots:
            self._log.append(commands.host_hold(slots))

    def release(self, slots: bytes) -> None:
        if slots:
            self._log.append(commands.host_release(slots))

    # Backups.

    def end_backup(self, backup: Backup, *, done: bool) -> None:
        """The pages have, or have not, arrived; the caller unlocks the node afterwards."""
        node, slots = backup.node, backup.slots
        if not done or node.detached:
            self.free(slots)
            return
        end = len(slots)
        del self.reserved[slots]
        left = backup.num_pages
        step: Node = node
        while left > 0:
            if step.num_pages > left:  # joined meanwhile with pages that stayed behind
                self._log.append(commands.split(step.id, step.num_pages - left))
            part = slots[end - len(step.refs) : end]
            command = commands.host_free(part) if step.host else None
            self._log.append(command or commands.host_attach(step.id, part))
            end -= len(part)
            left -= step.num_pages
            assert step.parent is not None, f"{step} is not in the tree"
            step = step.parent

    # Pages on the host alone.

    def insert(self, parent: Node, namespace: bytes, tokens: bytes, slots: bytes) -> Node:
        """Pages have come from storage: a new leaf."""
        del self.reserved[slots]
        node = cast(
            Node, self._log.append(commands.host_insert(parent.id, namespace, tokens, slots))
        )
        self.policy.unlocked((node,))
        self.touch(parent)
        return node

    def demote(self, node: Node) -> bytes:
        """Free a node's device pages; returns their refs."""
        refs = cast(bytes, self._log.append(commands.demote((node.id,))))
        self.policy.unlocked((node,))
        return refs

    def adopt(self, node: Node, refs: bytes) -> None:
        """A request's pages, which it has computed or loaded, are those of `node`."""
        self._log.append(commands.adopt(node.id, refs))
        self.policy.locked((node,))
        if self.exclusive:
            self._log.append(commands.host_evict((node.id, node.num_pages)))

    def touch(self, node: Node) -> None:
        """The path down to `node` is used: what of it is on the host alone goes last."""
        step: Node | None = node
        while step is not None and not step.refs and step.parent is not None:
            self.policy.locked((step,))
            self.policy.unlocked((step,))
            step = step.parent

    def was_split(self, upper: Node, lower: Node) -> None:
        """A node was cut in two."""
        if not upper.refs:
            self.policy.unlocked((upper,))
            self.touch(lower)

    # Eviction.

    def evict(self, num_pages: int) -> int:
        """Drop up to `num_pages` pages that are on the host alone; returns how many."""
        victims = self.policy.victims(num_pages)
        if not victims:
            return 0
        if self.ages is not None:
            for node, pages in victims:
                self.ages.happened("evicted", "host", node.last_access, pages)
        flat = [number for node, pages in victims for number in (node.id, pages)]
        keys = self._log.append(commands.host_evict(tuple(flat)))
        gone = [node for node, _ in victims]
        if gone[-1].parent is not None:
            gone.pop()  # only its tail went
        self.policy.locked(gone)
        self.ghosts.remember(keys)
        count = sum(pages for _, pages in victims)
        self.evicted_pages += count
        return count

    def _drop_duplicates(self, num_pages: int) -> int:
        """Drop host copies of what the device holds and storage, or nobody, needs; how many."""
        if not (self.exclusive and self._tree.host_pages):
            return 0
        count = 0
        for node in list(self._tree.nodes.values()):
            if count >= num_pages:
                break
            if node.refs and node.host and (node.stored or not self.waits_for_storage):
                count += node.num_pages
                self.drop_duplicate(node)
        return count

    def drop_below(self, node: Node) -> None:
        """Forget what is on the host alone below a node that leaves both tiers."""
        for child in list(node.children.values()):
            self.drop_below(child)
            self.ghosts.remember(self._log.append(commands.host_evict((child.id, child.num_pages))))
            self.policy.locked((child,))

    def forget_all(self) -> None:
        """Drop every host copy, uncounted: a flush."""
        flat = [n for node in self.policy.order() for n in (node.id, node.num_pages)]
        self.policy.locked(self.policy.order())
        both = [node for node in self._tree.nodes.values() if node.refs and node.host]
        flat += [n for node in both for n in (node.id, node.num_pages)]
        if flat:
            self._log.append(commands.host_evict(tuple(flat)))

    def mark_stored(self, node: Node, num_pages: int) -> None:
        """Pages have reached storage; only whole nodes are marked."""
        left = num_pages
        for step in self._path(node):
            if step.num_pages > left:
                break
            left -= step.num_pages
        if left < num_pages:
            self._log.append(commands.stored(node.id, num_pages - left))

    def unmark_stored(self, node: Node) -> None:
        """Storage has lost pages of this node."""
        self._log.append(commands.not_stored(node.id))

    def not_stored(self) -> list[Node]:
        """Nodes on the host that are not known to be in storage."""
        return [node for node in self._tree.nodes.values() if node.host and not node.stored]

    def forget_stored(self) -> None:
        """There is another storage now, or none."""
        self._log.append(commands.stored(0, 0))

    def drop_duplicate(self, node: Node) -> None:
        """Give up the host copy of a node that is on the device."""
        self._log.append(commands.host_evict((node.id, node.num_pages)))

    def _path(self, node: Node) -> list[Node]:
        out = []
        step: Node | None = node
        while step is not None and step is not self._tree.root:
            out.append(step)
            step = step.parent
        return out

    def slots_of(self, node: Node, num_pages: int) -> bytes:
        """Host slots of the nodes that end with `node` and have `num_pages` pages."""
        parts = [step.host for step in covered(self._tree, node, num_pages)]
        return b"".join(reversed(parts))
