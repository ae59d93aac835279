"""The leader's host side of window state: which tails get, keep and lose a copy on the host.

    device pages --begin_backup--> Backup --end_backup(done)--> on both tiers
                                         `-(failed)---------> as before, slots freed

A copy is named by its slot; `WindowState.host_home` says which node has it. What goes first is what
was copied or used longest ago; the pages of a tail lie next to each other in that order, so one
tail is gone before the next is touched. A page of the full component that leaves all tiers takes
its copy along without a word: such slots are passed over when their turn comes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

from phloem.cache.components import ABSENT_BYTES
from phloem.cache.host_ledger import Backup
from phloem.cache.node import REF_BYTES, Node
from phloem.replica import window_commands

if TYPE_CHECKING:
    from phloem.cache.leader import Leader

__all__ = ["WindowHost"]


class WindowHost:
    """Decides evictions of host copies of window state and writes their commands."""

    __slots__ = ("_leader", "_log", "_order", "_state", "evicted_pages", "reserved")

    def __init__(self, leader: Leader) -> None:
        assert leader.state.window is not None, "the state has no windows"
        self._leader = leader
        self._log = leader.log
        self._state = leader.state.window
        self._order: OrderedDict[int, None] = OrderedDict()  # slots, the next victim first
        self.reserved: dict[bytes, None] = {}  # runs of slots that transfers own
        self.evicted_pages = 0

    @property
    def capacity(self) -> int:
        return self._state.host.capacity

    @property
    def free_pages(self) -> int:
        return self._state.host.num_free

    @property
    def num_pages(self) -> int:
        """Copies that there are."""
        return len(self._state.host_home)

    # Slots.

    def allocate(self, num_pages: int) -> bytes | None:
        """Slots for a transfer to write to, evicting if need be; None if there is no room."""
        if num_pages > self.capacity:
            return None
        while self.free_pages < num_pages:
            if not self.evict(num_pages - self.free_pages):
                return None
        slots = cast(bytes, self._log.append(window_commands.window_host_alloc(num_pages)))
        self.reserved[slots] = None
        return slots

    def free(self, slots: bytes) -> None:
        """Give back what `allocate` gave."""
        del self.reserved[slots]
        self._log.append(window_commands.window_host_free(slots))

    def hold(self, slots: bytes) -> None:
        """Keep slots from being used again while a transfer may still touch them."""
        if slots:
            self._log.append(window_commands.window_host_hold(slots))

    def release(self, slots: bytes) -> None:
        """Undo one `hold`."""
        if slots:
            self._log.append(window_commands.window_host_release(slots))

    # Copies.

    def begin_backup(self, node: Node, pages: Sequence[int]) -> Backup | None:
        """Lock window pages of the path that ends with `node`, and find them slots.

        None, and nothing changed, if the host has no room.
        """
        slots = self.allocate(len(pages))
        if slots is None:
            return None
        leader = self._leader
        assert leader.window is not None, "the leader has no windows"
        leader.lock(node, leader.tree.root)
        leader.window.lock(pages)
        window_slots = tuple(array("q", slots))
        backup = Backup(
            node=node, refs=b"", slots=b"", window_pages=tuple(pages), window_slots=window_slots
        )
        leader.backups.add(backup)
        return backup

    def end_backup(self, backup: Backup, *, done: bool) -> None:
        """The copy has ended: it counts from now on, or its slots are free again."""
        leader = self._leader
        assert leader.window is not None, "the leader has no windows"
        leader.backups.discard(backup)
        slots = array("q", backup.window_slots).tobytes()
        if done and not backup.node.detached:
            places = [(self._state.home[page], page) for page in backup.window_pages]
            where = [(node, _index(node.extra[0].refs, page)) for node, page in places]
            self.attach(slots, where)
        else:
            self.free(slots)
        leader.window.unlock(backup.window_pages)
        leader.unlock(backup.node)

    def attach(self, slots: bytes, where: Sequence[tuple[Node, int] | None]) -> int:
        """What a transfer has brought into `slots` is the window state of these (node, page).

        None, or a page that has a copy by now: its slot is freed. Returns how many were taken.
        """
        del self.reserved[slots]
        spare, taken = array("q"), 0
        runs: list[tuple[Node, int, array[int]]] = []
        for slot, place in zip(array("q", slots), where, strict=True):
            if place is None or _has_copy(*place):
                spare.append(slot)
                continue
            node, page = place
            taken += 1
            if runs and runs[-1][0] is node and runs[-1][1] + len(runs[-1][2]) == page:
                runs[-1][2].append(slot)
            else:
                runs.append((node, page, array("q", [slot])))
        for node, first, run in runs:
            self._log.append(window_commands.window_host_attach(node.id, first, run.tobytes()))
            self.touch(run)
        if spare:
            self._log.append(window_commands.window_host_free(spare.tobytes()))
        return taken

    def touch(self, slots: Iterable[int]) -> None:
        """These copies are used: they go last."""
        for slot in slots:
            self._order[slot] = None
            self._order.move_to_end(slot)

    def evict(self, num_pages: int) -> int:
        """Drop up to `num_pages` copies; returns how many."""
        victims = array("q")
        while self._order and len(victims) < num_pages:
            slot, _ = self._order.popitem(last=False)
            if slot in self._state.host_home:
                victims.append(slot)
        if victims:
            self.evicted_pages += len(victims)
            self._log.append(window_commands.window_host_evict(victims.tobytes()))
        return len(victims)

    def order(self) -> list[int]:
        """The copies that there are, the next victim first (for checks)."""
        return [slot for slot in self._order if slot in self._state.host_home]


def _index(places: bytes, page: int) -> int:
    """Where in a node's packed places `page` is."""
    return array("q", places).index(page)


def _has_copy(node: Node, page: int) -> bool:
    host = node.extra[0].host
    return bool(host) and host[page * REF_BYTES : (page + 1) * REF_BYTES] != ABSENT_BYTES
