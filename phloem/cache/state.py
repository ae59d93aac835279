"""The replicated state: the tree and every owner's allocator, changed by commands alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from phloem.cache.chain import Hasher, default_hasher
from phloem.cache.components import FULL, Component
from phloem.cache.node import Node
from phloem.cache.tree import RadixTree
from phloem.core.refs import owner_of
from phloem.replica import (
    Alloc,
    Append,
    Command,
    Detach,
    Evict,
    Free,
    Insert,
    Lock,
    Merge,
    PageAllocator,
    Split,
    Unlock,
)

__all__ = ["CacheState"]


class CacheState:
    """One rank's copy. The same code runs on the leader and on every follower.

    `apply` returns what only the leader needs: refs, nodes, or lists of nodes whose eviction
    status changed.
    """

    __slots__ = ("_handlers", "allocators", "now", "tree")

    def __init__(
        self,
        page_size: int,
        num_pages: tuple[int, ...],
        *,
        components: tuple[Component, ...] = (FULL,),
        hasher: Hasher = default_hasher,
    ) -> None:
        self.tree = RadixTree(page_size, components=components, hasher=hasher)
        self.allocators = tuple(PageAllocator(owner, n) for owner, n in enumerate(num_pages))
        self.now = 0  # log time: commands applied so far
        self._handlers: dict[type[Any], Callable[[Any], Any]] = {
            Alloc: self._alloc,
            Free: self._free,
            Insert: self._insert,
            Append: self._append,
            Split: self._split,
            Merge: self._merge,
            Lock: self._lock,
            Unlock: self._unlock,
            Evict: self._evict,
            Detach: self._detach,
        }

    def apply(self, command: Command) -> Any:
        """Carry out one command."""
        self.now += 1
        return self._handlers[type(command)](command)

    def digest(self) -> str:
        """A fingerprint of tree, allocators and log time."""
        parts = [allocator.digest() for allocator in self.allocators]
        parts.append(self.tree.digest())
        return f"{self.now}:{hashlib.blake2b(b''.join(parts), digest_size=16).hexdigest()}"

    def _alloc(self, command: Alloc) -> bytes:
        return self.allocators[command.owner].alloc(command.num_pages)

    def _free(self, command: Free) -> None:
        self._give_back(command.refs)

    def _give_back(self, refs: bytes) -> None:
        if len(self.allocators) == 1:
            self.allocators[0].free(refs)
            return
        by_owner: list[list[bytes]] = [[] for _ in self.allocators]
        for start in range(0, len(refs), 8):
            ref = refs[start : start + 8]
            by_owner[owner_of(int.from_bytes(ref, "little"))].append(ref)
        for allocator, own in zip(self.allocators, by_owner, strict=True):
            allocator.free(b"".join(own))

    def _insert(self, command: Insert) -> Node:
        tree = self.tree
        parent = tree.nodes[command.parent]
        return tree.insert(parent, command.namespace, command.tokens, command.refs, self.now)

    def _append(self, command: Append) -> None:
        tree = self.tree
        tree.append(tree.nodes[command.node], command.tokens, command.refs)

    def _split(self, command: Split) -> Node:
        return self.tree.split(self.tree.nodes[command.node], command.num_pages)

    def _merge(self, command: Merge) -> list[Node]:
        return self.tree.merge(self.tree.nodes[command.node], command.num_ancestors)

    def _lock(self, command: Lock) -> list[Node]:
        nodes = self.tree.nodes
        return self.tree.lock(nodes[command.node], nodes[command.above], self.now)

    def _unlock(self, command: Unlock) -> tuple[list[Node], bytes]:
        idle, refs = self.tree.unlock(self.tree.nodes[command.node], self.now)
        if refs:
            self._give_back(refs)
        return idle, refs

    def _evict(self, command: Evict) -> tuple[bytes, bytes]:
        tree, nodes = self.tree, self.tree.nodes
        all_refs, all_keys = [], []
        pairs = iter(command.victims)
        for node_id, num_pages in zip(pairs, pairs, strict=True):
            refs, keys = tree.remove_tail(nodes[node_id], num_pages)
            all_refs.append(refs)
            all_keys.append(keys)
        refs = b"".join(all_refs)
        self._give_back(refs)
        return refs, b"".join(all_keys)

    def _detach(self, _command: Detach) -> None:
        self.tree.detach()
