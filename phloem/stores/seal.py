"""Integrity for backends that do not check content themselves: a seal behind every object.

    | payload (zero copy) | seal: magic, payload bytes, key (48), xxh3 of payload and the rest |

The seal stands behind the payload so that an aligned buffer stays aligned on its way to the disk.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import xxhash

from phloem.core.store import KEY_BYTES, Caps, Gone, Status
from phloem.stores.backend import Backend, Item, Usage, num_bytes

__all__ = ["SEAL_BYTES", "SealedBackend"]

_MAGIC = b"PHLS\x00\x00\x00\x01"
_BODY = struct.Struct(f"<8sQ{KEY_BYTES}s")
_DIGEST = struct.Struct("<Q")
SEAL_BYTES = _BODY.size + _DIGEST.size


def _seal(item: Item) -> bytes:
    body = _BODY.pack(_MAGIC, num_bytes(item), item.key)
    digest = xxhash.xxh3_64()
    for part in item.parts:
        digest.update(part)
    digest.update(body)
    return body + _DIGEST.pack(digest.intdigest())


class SealedBackend:
    """Wraps a backend; an object that is not exactly what was put under its key is CORRUPT."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    @property
    def caps(self) -> Caps:
        caps = self._inner.caps
        largest = max(0, caps.max_object_bytes - SEAL_BYTES)
        return replace(caps, max_object_bytes=largest, verifies=True)

    def put(self, items: Sequence[Item]) -> list[Status]:
        return self._inner.put(
            [Item(item.key, (*item.parts, memoryview(_seal(item)))) for item in items]
        )

    def get(self, items: Sequence[Item]) -> list[Status]:
        seals = [memoryview(bytearray(SEAL_BYTES)) for _ in items]
        statuses = self._inner.get(
            [Item(item.key, (*item.parts, seal)) for item, seal in zip(items, seals, strict=True)]
        )
        bad = []
        for index, (item, seal) in enumerate(zip(items, seals, strict=True)):
            if statuses[index] is Status.OK and seal != _seal(item):
                statuses[index] = Status.CORRUPT
                bad.append(item.key)
        if bad:  # else the next put would keep the bad object
            self._inner.drop(bad)
        return statuses

    def probe(self, keys: Sequence[bytes]) -> list[Status]:
        return self._inner.probe(keys)

    def drop(self, keys: Sequence[bytes]) -> list[Status]:
        return self._inner.drop(keys)

    def gone(self, under_way: Callable[[bytes], bool]) -> Gone:
        return self._inner.gone(under_way)

    def usage(self) -> Usage:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()
