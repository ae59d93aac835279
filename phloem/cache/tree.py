"""The compressed radix tree over pages of tokens.

    root --"ns1"+page--> [A: 4 pages] --page--> [B: 2 pages]
      |                       `--------page--> [C: 1 page ]
      `--"ns2"+page--> [D: 3 pages]

A child is keyed by the bytes of its first page, below the root by namespace + first page. (The
first page has a fixed length, so no namespace can pass for another one.) Edges are compared as
bytes; no hash or id is trusted. Methods that change the tree are called by `CacheState.apply`
alone; they move refs about and never allocate or free a page. Those that concern the host tier are
in `cache/residence.py`.
"""

from __future__ import annotations

import hashlib

from phloem.cache.chain import (
    KEY_BYTES,
    Hasher,
    chain_keys,
    default_hasher,
    pack_keys,
    unpack_keys,
)
from phloem.cache.components import FULL, Component, ExtraState
from phloem.cache.node import REF_BYTES, Node
from phloem.core.tokens import TOKEN_BYTES

__all__ = ["ROOT_ID", "RadixTree"]

ROOT_ID = 0


class RadixTree:
    """All nodes by id, and sums over them.

    `version` grows when what can be matched changes, `epoch` also when only its shape does.
    """

    __slots__ = (
        "components",
        "epoch",
        "hasher",
        "host_pages",
        "locked_pages",
        "next_id",
        "nodes",
        "page_bytes",
        "root",
        "total_pages",
        "version",
    )

    def __init__(self, page_size: int, *, components: tuple[Component, ...] = (FULL,)) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self.components = components
        self.hasher: Hasher = default_hasher
        self.root = Node(ROOT_ID, None, b"", b"", b"")
        self.nodes: dict[int, Node] = {ROOT_ID: self.root}
        self.next_id = ROOT_ID + 1
        self.total_pages = 0  # on the device, in all nodes, detached ones included
        self.locked_pages = 0  # of these in nodes with locks
        self.host_pages = 0  # on the host, whether or not they are on the device too
        self.version = 0
        self.epoch = 0

    def find(self, namespace: bytes, tokens: bytes, end: int) -> tuple[Node, int, int]:
        """The longest known prefix of tokens[:end] (`end` in bytes, a multiple of the page).

        Returns the last node reached, how many of its pages match, and the bytes matched.
        """
        node, offset = self.root, 0
        if end <= 0:
            return node, 0, 0
        page_bytes = self.page_bytes
        startswith = tokens.startswith
        child = node.children.get(namespace + tokens[:page_bytes])
        while child is not None:
            edge = child.key
            stop = offset + len(edge)
            if stop > end or not startswith(edge, offset):
                pages = self.common_pages(edge, tokens, offset, end)
                return child, pages, offset + pages * page_bytes
            node, offset = child, stop
            if stop == end:
                break
            child = child.children.get(tokens[stop : stop + page_bytes])
        return node, len(node.chain) // KEY_BYTES, offset

    def child_of(self, node: Node, namespace: bytes, tokens: bytes, offset: int) -> Node | None:
        """The child whose first page is tokens[offset:offset + page]."""
        page = tokens[offset : offset + self.page_bytes]
        return node.children.get(namespace + page if node is self.root else page)

    def common_pages(self, edge: bytes, tokens: bytes, offset: int, end: int) -> int:
        """How many whole pages of `edge` equal tokens[offset:end]; the first one is known to."""
        page_bytes = self.page_bytes
        startswith = tokens.startswith
        limit = min(len(edge), end - offset) // page_bytes
        if startswith(edge[: limit * page_bytes], offset):
            return limit
        low, high = 1, limit - 1  # pages known to be equal; pages that may be
        while low < high:
            middle = (low + high + 1) // 2
            part = edge[low * page_bytes : middle * page_bytes]
            if startswith(part, offset + low * page_bytes):
                low = middle
            else:
                high = middle - 1
        return low

    def chain_key(self, node: Node, num_pages: int, namespace: bytes) -> int:
        """The content key of the node's page number `num_pages` - 1; of the root: the seed."""
        if node is self.root:
            return self.hasher(namespace, 0)
        return unpack_keys(node.chain[(num_pages - 1) * KEY_BYTES : num_pages * KEY_BYTES])[0]

    def insert(self, parent: Node, namespace: bytes, tokens: bytes, refs: bytes, now: int) -> Node:
        """Add a leaf with one lock; the caller's lock on `parent` counts it already."""
        node = Node(self.next_id, parent, namespace, tokens, refs)
        node.locks = 1
        node.hits = 1
        self.add_leaf(node, now)
        self._grown(node.num_pages)
        return node

    def add_leaf(self, node: Node, now: int) -> None:
        """Hang a new node, whose id is `next_id`, below its parent."""
        parent = node.parent
        assert parent is not None, "the root has no parent"
        self.next_id += 1
        node.last_access = now if parent is self.root else parent.last_access
        node.chain = self._chain_after(parent, node.namespace, node.key)
        node.extra = self._no_extra(node.num_pages)
        self._adopt(parent, node)
        self.nodes[node.id] = node

    def append(self, node: Node, tokens: bytes, refs: bytes) -> None:
        """Lengthen a leaf that has exactly one lock."""
        assert node.locks == 1, f"{node} cannot be lengthened"
        assert not node.children, f"{node} cannot be lengthened"
        assert node.residence == (True, False, False), f"{node} cannot be lengthened"
        num_pages = len(refs) // REF_BYTES
        node.chain += self._chain_after(node, node.namespace, tokens)
        node.key += tokens
        node.refs += refs
        for state in node.extra:
            state.grow(num_pages)
        self._grown(num_pages)

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut off the node's first `num_pages` pages as a new node above it, and return that."""
        assert 0 < num_pages < node.num_pages, f"{node} cannot be split at {num_pages}"
        parent = node.parent
        assert parent is not None, "the root cannot be split"
        cut, cut_refs = num_pages * self.page_bytes, num_pages * REF_BYTES
        upper = Node(self.next_id, parent, node.namespace, node.key[:cut], node.refs[:cut_refs])
        self.next_id += 1
        upper.chain = node.chain[: num_pages * KEY_BYTES]
        upper.host = node.host[:cut_refs]
        upper.stored = node.stored
        upper.locks = node.locks
        upper.hits = node.hits
        upper.last_access = node.last_access
        upper.detached = node.detached
        upper.extra = tuple(state.split(cut_refs) for state in node.extra)
        self._adopt(parent, upper)  # under the key that was the node's
        node.key = node.key[cut:]
        node.refs = node.refs[cut_refs:]
        node.host = node.host[cut_refs:]
        node.chain = node.chain[num_pages * KEY_BYTES :]
        self._adopt(upper, node)
        self.nodes[upper.id] = upper
        self.epoch += 1
        return upper

    def merge(self, node: Node, num_ancestors: int) -> list[Node]:
        """Join a node with the ancestors right above it. Returns those, which are gone."""
        run = [node]
        while len(run) <= num_ancestors:
            upper = run[-1].parent
            assert upper is not None, "the root cannot be merged"
            assert len(upper.children) == 1, f"{upper} is not private"
            assert upper.locks == node.locks, f"{upper} has locks of its own"
            assert upper.residence == node.residence, f"{upper} lies elsewhere than {node}"
            run.append(upper)
        gone = run[1:]
        run.reverse()
        parent = run[0].parent
        assert parent is not None, "the root cannot be merged"
        node.key = b"".join([part.key for part in run])
        node.refs = b"".join([part.refs for part in run])
        node.host = b"".join([part.host for part in run])
        node.chain = b"".join([part.chain for part in run])
        for index, state in enumerate(node.extra):
            state.join([part.extra[index] for part in run])
        node.last_access = run[0].last_access
        self._adopt(parent, node)
        for part in gone:
            del self.nodes[part.id]
            part.parent = None
            part.children = {}
        self.epoch += 1
        return gone

    def run_above(self, node: Node, most_times_longer: int) -> int:
        """How many ancestors right above can be joined with `node`.

        Each is at most so many times as long as what it is joined with: then joining copies each
        token a bounded number of times while a session grows, and its path has O(log) nodes.
        """
        length = len(node.key)
        count = 0
        parent = node.parent
        while (
            parent is not None
            and len(parent.children) == 1
            and parent.locks == node.locks
            and parent.parent is not None
            and parent.residence == node.residence
            and len(parent.key) <= most_times_longer * length
        ):
            count += 1
            length += len(parent.key)
            parent = parent.parent
        return count

    def remove_tail(self, node: Node, num_pages: int) -> tuple[bytes, bytes]:
        """Drop the last pages of an unlocked leaf, and the leaf with the last one of them.

        Returns the refs and the content keys of what went.
        """
        assert not node.locks, f"{node} is locked"
        assert not node.children, f"{node} has children"
        assert not node.host, f"{node} is on the host"
        assert 0 < num_pages <= node.num_pages, f"{node} has not {num_pages} pages"
        left = node.num_pages - num_pages
        refs = node.refs[left * REF_BYTES :]
        chain = node.chain[left * KEY_BYTES :]
        if left:
            node.key = node.key[: left * self.page_bytes]
            node.refs = node.refs[: left * REF_BYTES]
            node.chain = node.chain[: left * KEY_BYTES]
            for state in node.extra:
                state.cut(left * REF_BYTES)
        else:
            self.drop(node)
        self.total_pages -= num_pages
        self.version += 1
        self.epoch += 1
        return refs, chain

    def detach(self) -> None:
        """Make everything unfindable. All nodes must be locked; they go as they are unlocked."""
        for node in self.nodes.values():
            assert node.locks or node is self.root, f"{node} is not locked"
            assert not node.host, f"{node} is on the host"
            node.detached = node is not self.root
        self.root.children = {}
        self.version += 1
        self.epoch += 1

    def lock(self, node: Node, above: Node) -> list[Node]:
        """Lock the path from `node` up to, without, `above`. Returns nodes that were unlocked."""
        fresh = []
        fresh_bytes = 0
        step: Node | None = node
        while step is not above:
            assert step is not None, f"{node} is not below {above}"
            locks = step.locks
            if not locks:
                fresh.append(step)
                fresh_bytes += len(step.refs)
            step.locks = locks + 1
            step.hits += 1
            step = step.parent
        self.locked_pages += fresh_bytes // REF_BYTES
        return fresh

    def unlock(self, node: Node, now: int) -> tuple[list[Node], bytes]:
        """Unlock the path from `node` to the root.

        Returns the nodes that nobody locks now, lowest first, and the refs of detached ones, which
        are gone.
        """
        idle = []
        idle_bytes = 0
        root = self.root
        step: Node | None = node
        while step is not root:
            assert step is not None, f"{node} is not in the tree"
            locks = step.locks = step.locks - 1
            step.last_access = now
            if locks <= 0:
                assert locks == 0, f"{step} is unlocked once too often"
                idle.append(step)
                idle_bytes += len(step.refs)
            step = step.parent
        self.locked_pages -= idle_bytes // REF_BYTES
        if idle and idle[0].detached:
            return [], self._drop_detached(idle)
        return idle, b""

    def digest(self) -> bytes:
        """A fingerprint of every node and every counter."""
        out = hashlib.blake2b(digest_size=16)
        out.update(f"{self.next_id},{self.total_pages},{self.locked_pages};".encode())
        for node_id in sorted(self.nodes):
            node = self.nodes[node_id]
            parent = -1 if node.parent is None else node.parent.id
            children = sorted(child.id for child in node.children.values())
            state = (node.locks, node.hits, node.last_access, node.detached)
            out.update(repr((node_id, parent, children, state, node.namespace)).encode())
            out.update(node.key + node.refs + node.chain)
            if node.host or node.stored:
                out.update(b"host%d:" % node.stored + node.host)
            for extra in node.extra:
                out.update(b"extra:" + extra.refs + b"," + extra.host)
        return out.digest()

    def _chain_after(self, node: Node, namespace: bytes, tokens: bytes) -> bytes:
        key = self.chain_key(node, node.num_pages, namespace)
        return pack_keys(chain_keys(self.hasher, key, tokens, self.page_bytes))

    def _no_extra(self, num_pages: int) -> tuple[ExtraState, ...]:
        if len(self.components) == 1:
            return ()
        return tuple(ExtraState.absent(num_pages) for _ in self.components[1:])

    def _child_key(self, parent: Node, node: Node) -> bytes:
        page = node.key[: self.page_bytes]
        return node.namespace + page if parent is self.root else page

    def _adopt(self, parent: Node, node: Node) -> None:
        node.parent = parent
        if not (node.detached and parent is self.root):
            parent.children[self._child_key(parent, node)] = node

    def _grown(self, num_pages: int) -> None:
        self.total_pages += num_pages
        self.locked_pages += num_pages
        self.version += 1
        self.epoch += 1

    def drop(self, node: Node) -> None:
        """Take a node without children out; what it holds is the caller's business."""
        parent = node.parent
        assert parent is not None, "the root cannot be dropped"
        del self.nodes[node.id]
        if not (node.detached and parent is self.root):
            del parent.children[self._child_key(parent, node)]
        node.parent = None

    def _drop_detached(self, nodes: list[Node]) -> bytes:
        for node in nodes:
            self.drop(node)
            self.total_pages -= len(node.refs) // REF_BYTES
        self.epoch += 1
        return b"".join([node.refs for node in nodes])
