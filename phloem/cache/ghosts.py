"""Ghosts: a bounded memory of evicted pages, to tell what went too early."""

from __future__ import annotations

from collections import OrderedDict

from phloem.cache.chain import Hasher, unpack_keys

__all__ = ["Ghosts"]


class Ghosts:
    """Content keys of the last evicted pages. The oldest are forgotten first."""

    __slots__ = ("capacity", "keys", "recalled_pages")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.recalled_pages = 0
        self.keys: OrderedDict[int, None] = OrderedDict()  # the oldest first

    def remember(self, packed_keys: bytes) -> None:
        """Pages were evicted."""
        keys = self.keys
        for key in unpack_keys(packed_keys):
            keys[key] = None
        while len(keys) > self.capacity:
            keys.popitem(last=False)

    def recall(
        self, hasher: Hasher, key: int, tokens: bytes, start: int, end: int, page_bytes: int
    ) -> int:
        """Count, and forget, how many pages of tokens[start:end], from the first on, were evicted.

        `key` is the content key of the page before them.
        """
        keys = self.keys
        count = 0
        for offset in range(start, end, page_bytes):
            key = hasher(tokens[offset : offset + page_bytes], key)
            if key not in keys:
                break
            del keys[key]
            count += 1
        self.recalled_pages += count
        return count
