"""Content keys: one 64-bit value per page that stands for the page and all before it.

    key(i) = H(tokens of page i, seed = key(i - 1)),    key(-1) = H(namespace, seed = 0)

They name pages that are gone (ghosts), in statistics. They never decide what is served: the tree
compares tokens. XXH3 gives the same values in every process and on every machine.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TypeAlias

import xxhash

__all__ = ["KEY_BYTES", "Hasher", "chain_keys", "default_hasher", "pack_keys", "unpack_keys"]

KEY_BYTES = 8
Hasher: TypeAlias = Callable[[bytes, int], int]  # (data, seed) -> 64 bits

default_hasher: Hasher = xxhash.xxh3_64_intdigest


def chain_keys(hasher: Hasher, key: int, tokens: bytes, page_bytes: int) -> list[int]:
    """The keys of all pages of `tokens`, which follow the page with key `key`."""
    starts = range(0, len(tokens), page_bytes)
    return [key := hasher(tokens[start : start + page_bytes], key) for start in starts]


def pack_keys(keys: list[int]) -> bytes:
    """Eight bytes a key."""
    return array("Q", keys).tobytes()


def unpack_keys(packed: bytes) -> list[int]:
    """What `pack_keys` was given."""
    return array("Q", packed).tolist()
