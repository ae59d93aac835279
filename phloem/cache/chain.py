"""Content keys: one 64-bit value per page that stands for the page and all before it.

    key(i) = H(key(i - 1) + tokens of page i),    key(-1) = H(namespace)

They name pages that are gone (ghosts), in statistics. They never decide what is served: the tree
compares tokens. XXH3 gives the same values in every process and on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import xxhash

__all__ = ["KEY_BYTES", "Hasher", "chain_keys", "default_hasher"]

KEY_BYTES = 8
Hasher: TypeAlias = Callable[[bytes], bytes]

default_hasher: Hasher = xxhash.xxh3_64_digest


def chain_keys(hasher: Hasher, key: bytes, tokens: bytes, page_bytes: int) -> bytes:
    """The keys of all pages of `tokens`, which follow the page with key `key`, packed."""
    keys = []
    for start in range(0, len(tokens), page_bytes):
        key = hasher(key + tokens[start : start + page_bytes])
        keys.append(key)
    return b"".join(keys)
