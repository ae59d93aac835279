"""The replicated state: the tree and all allocators, changed by commands alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from phloem.cache import residence
from phloem.cache.components import FULL, Component
from phloem.cache.node import REF_BYTES, Node
from phloem.cache.page_replicas import PageReplicas
from phloem.cache.tree import RadixTree
from phloem.cache.window import WindowConfig
from phloem.cache.window_state import WindowState
from phloem.replica import (
    Command,
    HostPool,
    PageAllocator,
    commands,
    give_back,
    window_commands,
)

__all__ = ["CacheState"]


class CacheState:
    """One rank's copy. The same code runs on the leader and on every follower.

    `apply` returns what only the leader needs: refs, nodes, or lists of nodes whose eviction
    status changed.
    """

    __slots__ = (
        "_handlers",
        "allocators",
        "free_pages",
        "host",
        "now",
        "replicas",
        "tree",
        "window",
    )

    def __init__(
        self,
        page_size: int,
        num_pages: tuple[int, ...],
        *,
        host_pages: int = 0,
        components: tuple[Component, ...] = (FULL,),
        window: WindowConfig | None = None,
    ) -> None:
        if window is not None:
            components = (FULL, Component("window", window.tokens))
        self.tree = RadixTree(page_size, components=components)
        self.allocators = tuple(PageAllocator(owner, n) for owner, n in enumerate(num_pages))
        self.host = HostPool(host_pages)
        self.replicas = PageReplicas(len(num_pages))
        self.free_pages = sum(num_pages)  # over all owners; those that hold replicas are free, too
        self.now = 0  # log time: commands applied so far
        handlers: dict[int, Callable[[Command], Any]] = {
            commands.ALLOC: self._alloc,
            commands.FREE: self._free,
            commands.INSERT: self._insert,
            commands.APPEND: self._append,
            commands.SPLIT: self._split,
            commands.MERGE: self._merge,
            commands.LOCK: self._lock,
            commands.UNLOCK: self._unlock,
            commands.EVICT: self._evict,
            commands.DETACH: self._detach,
            commands.HOST_ALLOC: self._host_alloc,
            commands.HOST_FREE: self._host_free,
            commands.HOST_HOLD: self._host_hold,
            commands.HOST_RELEASE: self._host_release,
            commands.HOST_ATTACH: self._host_attach,
            commands.HOST_INSERT: self._host_insert,
            commands.DEMOTE: self._demote,
            commands.ADOPT: self._adopt,
            commands.HOST_EVICT: self._host_evict,
            commands.STORED: self._stored,
            commands.NOT_STORED: self._not_stored,
            commands.REPLICATE: self._replicate,
            commands.REPLICATED: self._replicated,
            commands.DROP_REPLICAS: self._drop_replicas,
        }
        num_ops = commands.NUM_OPS
        self.window: WindowState | None = None
        if window is not None:
            self.window = WindowState(self.tree, window)
            handlers.update(self.window.handlers())
            num_ops = window_commands.NUM_OPS
        self._handlers = [handlers[op] for op in range(num_ops)]

    def apply(self, command: Command) -> Any:
        """Carry out one command."""
        self.now += 1
        return self._handlers[command[0]](command)

    def digest(self) -> str:
        """A fingerprint of tree, allocators, replicas and log time."""
        parts = [allocator.digest() for allocator in self.allocators]
        parts += [self.host.digest(), self.tree.digest(), self.replicas.digest()]
        if self.window is not None:
            parts.append(self.window.digest())
        return f"{self.now}:{hashlib.blake2b(b''.join(parts), digest_size=16).hexdigest()}"

    def free_by_pool(self) -> dict[str, int]:
        """Free pages of every pool of every owner, and of the host, by its name."""
        free = {f"pages of owner {each.owner}": each.num_free for each in self.allocators}
        free["host pages"] = self.host.num_free
        if self.window is not None:
            for each in self.window.allocators:
                free[f"window pages of owner {each.owner}"] = each.num_free
            free["host window pages"] = self.window.host.num_free
        return free

    def room(self) -> list[int]:
        """How many pages each owner has that hold nothing, or nothing but replicas."""
        count = self.replicas.count
        return [pool.num_free + count(owner) for owner, pool in enumerate(self.allocators)]

    def _alloc(self, command: Command) -> bytes:
        _, owner, num_pages = command
        self.free_pages -= num_pages
        return self.allocators[owner].alloc(num_pages)

    def _free(self, command: Command) -> None:
        self._give_back(command[1])

    def _give_back(self, refs: bytes) -> None:
        self.free_pages += len(refs) // REF_BYTES
        give_back(self.allocators, refs + self.replicas.leave(refs))

    def _insert(self, command: Command) -> Node:
        _, parent, namespace, tokens, refs = command
        return self.tree.insert(self.tree.nodes[parent], namespace, tokens, refs, self.now)

    def _append(self, command: Command) -> None:
        _, node, tokens, refs = command
        self.tree.append(self.tree.nodes[node], tokens, refs)

    def _split(self, command: Command) -> Node:
        _, node, num_pages = command
        upper = self.tree.split(self.tree.nodes[node], num_pages)
        if self.window is not None:
            self.window.moved((upper,), upper)
        return upper

    def _merge(self, command: Command) -> list[Node]:
        _, node_id, num_ancestors = command
        node = self.tree.nodes[node_id]
        gone = self.tree.merge(node, num_ancestors)
        if self.window is not None:
            self.window.moved(gone, node)
        return gone

    def _lock(self, command: Command) -> list[Node]:
        tree = self.tree
        nodes = tree.nodes
        return tree.lock(nodes[command[1]], nodes[command[2]])

    def _unlock(self, command: Command) -> tuple[list[Node], bytes]:
        idle, refs = self.tree.unlock(self.tree.nodes[command[1]], self.now)
        if refs:
            self._give_back(refs)
        return idle, refs

    def _evict(self, command: Command) -> tuple[bytes, bytes]:
        tree, nodes = self.tree, self.tree.nodes
        all_refs, all_keys = [], []
        pairs = iter(command[1])
        for node_id, num_pages in zip(pairs, pairs, strict=True):
            if self.window is not None:
                self.window.leave_device(nodes[node_id], num_pages)
                self.window.leave_host(nodes[node_id], num_pages)
            refs, keys = tree.remove_tail(nodes[node_id], num_pages)
            all_refs.append(refs)
            all_keys.append(keys)
        gone = b"".join(all_refs)
        self._give_back(gone)
        return gone, b"".join(all_keys)

    def _detach(self, _command: Command) -> None:
        self.tree.detach()

    def _host_alloc(self, command: Command) -> bytes:
        return self.host.alloc(command[1])

    def _host_free(self, command: Command) -> None:
        self.host.free(command[1])

    def _host_hold(self, command: Command) -> None:
        self.host.hold(command[1])

    def _host_release(self, command: Command) -> None:
        self.host.release(command[1])

    def _host_attach(self, command: Command) -> None:
        _, node, slots = command
        residence.attach_host(self.tree, self.tree.nodes[node], slots)

    def _host_insert(self, command: Command) -> Node:
        _, parent, namespace, tokens, slots = command
        node = self.tree.nodes[parent]
        return residence.insert_host(self.tree, node, namespace, tokens, slots, self.now)

    def _demote(self, command: Command) -> bytes:
        nodes = [self.tree.nodes[node] for node in command[1]]
        if self.window is not None:
            for node in nodes:
                self.window.leave_device(node, node.num_pages)
        refs = b"".join([residence.demote(self.tree, node) for node in nodes])
        self._give_back(refs)
        return refs

    def _adopt(self, command: Command) -> None:
        _, node, refs = command
        residence.adopt(self.tree, self.tree.nodes[node], refs)

    def _host_evict(self, command: Command) -> bytes:
        nodes, all_keys = self.tree.nodes, []
        pairs = iter(command[1])
        for node_id, num_pages in zip(pairs, pairs, strict=True):
            if self.window is not None and not nodes[node_id].refs:
                self.window.leave_host(nodes[node_id], num_pages)
            slots, keys = residence.drop_host(self.tree, nodes[node_id], num_pages)
            self.host.free(slots)
            all_keys.append(keys)
        return b"".join(all_keys)

    def _stored(self, command: Command) -> None:
        _, node, num_pages = command
        if not num_pages:
            residence.forget_stored(self.tree)
            return
        residence.mark_stored(self.tree, self.tree.nodes[node], num_pages)

    def _not_stored(self, command: Command) -> None:
        residence.unmark_stored(self.tree.nodes[command[1]])

    def _replicate(self, command: Command) -> bytes:
        _, owner, refs = command
        replicas = self.allocators[owner].alloc(len(refs) // REF_BYTES)
        self.replicas.add(refs, replicas)
        return replicas

    def _replicated(self, command: Command) -> None:
        self.replicas.commit(command[1])

    def _drop_replicas(self, command: Command) -> None:
        self.replicas.drop(command[1])
        give_back(self.allocators, command[1])
