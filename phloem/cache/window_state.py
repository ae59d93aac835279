"""The replicated state of the window component: pools, who locks what, and where it lies.

A page of window state is named by its ref. `home` says which node has it (the node's own list has
its place), so that a page can be evicted, locked and found again whatever became of the nodes
meanwhile: splits and joins take pages along. Only `CacheState.apply` changes any of this.

    free --alloc--> a request's own --attach--> in the tree, locked <--> unlocked --evict--> free
     ^                    |                                                 |
     `------- free -------'         a page of the full component goes ------'
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from phloem.cache.components import ABSENT, ABSENT_BYTES, absent_pages
from phloem.cache.node import REF_BYTES, REF_DTYPE, Node
from phloem.cache.tree import RadixTree
from phloem.cache.window import WindowConfig
from phloem.core.refs import owner_of
from phloem.replica import Command, HostPool, PageAllocator, give_back, window_commands

__all__ = ["WindowState", "alive"]


def alive(refs: bytes) -> list[int]:
    """Those of packed refs that are not ABSENT."""
    places = np.frombuffer(refs, REF_DTYPE)
    found: list[int] = places[places >= 0].tolist()
    return found


class WindowState:
    """One rank's copy."""

    __slots__ = (
        "allocators",
        "free_pages",
        "home",
        "host",
        "host_home",
        "idle_pages",
        "locks",
        "tree",
    )

    def __init__(self, tree: RadixTree, config: WindowConfig) -> None:
        self.tree = tree
        self.allocators = tuple(PageAllocator(owner, n) for owner, n in enumerate(config.pages))
        self.free_pages = sum(config.pages)
        self.home: dict[int, Node] = {}  # of every page in the tree
        self.locks: dict[int, int] = {}  # of pages in the tree that somebody locks
        self.idle_pages = [0] * len(config.pages)  # of each owner: in the tree, locked by nobody
        self.host = HostPool(config.host_pages)
        self.host_home: dict[int, Node] = {}

    def handlers(self) -> dict[int, Callable[[Command], Any]]:
        """What carries out which command."""
        ops = window_commands
        return {
            ops.WINDOW_ALLOC: self._alloc,
            ops.WINDOW_FREE: lambda command: self._give_back(command[1]),
            ops.WINDOW_ATTACH: self._attach,
            ops.WINDOW_LOCK: self._lock,
            ops.WINDOW_UNLOCK: self._unlock,
            ops.WINDOW_EVICT: self._evict,
            ops.WINDOW_HOST_ALLOC: lambda command: self.host.alloc(command[1]),
            ops.WINDOW_HOST_FREE: lambda command: self.host.free(command[1]),
            ops.WINDOW_HOST_HOLD: lambda command: self.host.hold(command[1]),
            ops.WINDOW_HOST_RELEASE: lambda command: self.host.release(command[1]),
            ops.WINDOW_HOST_ATTACH: self._host_attach,
            ops.WINDOW_HOST_EVICT: self._host_evict,
        }

    def digest(self) -> bytes:
        """A fingerprint; what `home` says is in the tree's own."""
        parts = [allocator.digest() for allocator in self.allocators]
        locks = repr((sorted(self.locks.items()), self.free_pages)).encode()
        return hashlib.blake2b(
            b"".join([*parts, self.host.digest(), locks]), digest_size=16
        ).digest()

    # What happens to nodes.

    def moved(self, nodes: Iterable[Node], to: Node) -> None:
        """What lay in `nodes` (their lists still say so) lies in `to` now."""
        for node in nodes:
            state = node.extra[0]
            for ref in alive(state.refs):
                self.home[ref] = to
            for slot in alive(state.host):
                self.host_home[slot] = to

    def leave_device(self, node: Node, num_pages: int) -> None:
        """The node's last pages are about to leave the device: so does their window state."""
        state = node.extra[0]
        kept = len(state.refs) - num_pages * REF_BYTES
        gone = alive(state.refs[kept:])
        if not gone:
            return
        state.refs = state.refs[:kept] + absent_pages(num_pages)
        self._forget(gone)

    def leave_host(self, node: Node, num_pages: int) -> None:
        """The node's last pages are about to leave the tree: so do the host copies of windows."""
        state = node.extra[0]
        if not state.host:
            return
        kept = len(state.host) - num_pages * REF_BYTES
        gone = alive(state.host[kept:])
        state.host = state.host[:kept] + absent_pages(num_pages)
        for slot in gone:
            del self.host_home[slot]
        self.host.free(array("q", gone).tobytes())

    # Commands.

    def _alloc(self, command: Command) -> bytes:
        _, owner, num_pages = command
        self.free_pages -= num_pages
        return self.allocators[owner].alloc(num_pages)

    def _attach(self, command: Command) -> None:
        _, node_id, first, refs = command
        node = self.tree.nodes[node_id]
        state = node.extra[0]
        start, stop = first * REF_BYTES, first * REF_BYTES + len(refs)
        tombstones = state.refs[start:stop]
        assert tombstones == ABSENT_BYTES * (len(refs) // REF_BYTES), f"{node} has window state"
        state.refs = state.refs[:start] + refs + state.refs[stop:]
        for ref in array("q", refs):
            self.home[ref] = node
            self.locks[ref] = 1
        self._changed()

    def _lock(self, command: Command) -> None:
        locks, home, idle = self.locks, self.home, self.idle_pages
        for ref in array("q", command[1]):
            assert ref in home, f"window page {ref} is locked and not in the tree"
            count = locks.get(ref, 0)
            if not count:
                idle[owner_of(ref)] -= 1
            locks[ref] = count + 1

    def _unlock(self, command: Command) -> list[int]:
        locks = self.locks
        idle = []
        for ref in array("q", command[1]):
            count = locks[ref] - 1
            if count:
                locks[ref] = count
            else:
                del locks[ref]
                idle.append(ref)
                self.idle_pages[owner_of(ref)] += 1
        return idle

    def _evict(self, command: Command) -> None:
        refs = array("q", command[1])
        self._blank(refs, self.home, lambda node: node.extra[0].refs, _set_refs)
        self._forget(refs)
        self._changed()

    def _host_attach(self, command: Command) -> None:
        _, node_id, first, slots = command
        node = self.tree.nodes[node_id]
        state = node.extra[0]
        host = state.host or absent_pages(node.num_pages)
        start, stop = first * REF_BYTES, first * REF_BYTES + len(slots)
        empty = absent_pages(len(slots) // REF_BYTES)
        assert host[start:stop] == empty, f"{node} has window state on the host"
        state.host = host[:start] + slots + host[stop:]
        for slot in array("q", slots):
            self.host_home[slot] = node
        self._changed()

    def _host_evict(self, command: Command) -> None:
        slots = array("q", command[1])
        self._blank(slots, self.host_home, lambda node: node.extra[0].host, _set_host)
        for slot in slots:
            del self.host_home[slot]
        self.host.free(command[1])
        self._changed()

    # Parts.

    def _blank(
        self,
        names: array[int],
        home: dict[int, Node],
        get: Callable[[Node], bytes],
        put: Callable[[Node, bytes], None],
    ) -> None:
        """Make tombstones of these places; pages that follow each other are found at once."""
        by_node: dict[Node, list[int]] = {}
        for name in names:
            by_node.setdefault(home[name], []).append(name)
        for node, gone in by_node.items():
            places = array("q", get(node))
            at = -1
            for name in gone:
                guess = at + 1
                at = guess if guess < len(places) and places[guess] == name else places.index(name)
                places[at] = ABSENT
            put(node, places.tobytes())

    def _forget(self, refs: Iterable[int]) -> None:
        packed = array("q", refs)
        for ref in packed:
            assert ref not in self.locks, f"window page {ref} is locked"
            del self.home[ref]
            self.idle_pages[owner_of(ref)] -= 1
        self._give_back(packed.tobytes())

    def _give_back(self, refs: bytes) -> None:
        self.free_pages += len(refs) // REF_BYTES
        give_back(self.allocators, refs)

    def _changed(self) -> None:
        self.tree.version += 1
        self.tree.epoch += 1


def _set_refs(node: Node, places: bytes) -> None:
    node.extra[0].refs = places


def _set_host(node: Node, places: bytes) -> None:
    node.extra[0].host = places if places != absent_pages(len(places) // REF_BYTES) else b""
