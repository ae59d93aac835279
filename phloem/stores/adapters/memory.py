"""Objects in this process's memory: the simplest backend, and the model the others are held to."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from phloem.core.store import Caps, Gone, Status
from phloem.stores.backend import Item, StoreOptions, Usage, num_bytes
from phloem.stores.losses import Losses

__all__ = ["MemoryBackend", "build"]

# What an entry costs besides its bytes: key, dict slot, bytes object (measured, rounded up).
ENTRY_BYTES = 256


class MemoryBackend:
    """A bounded dict; the least recently read or written object goes first."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._used_bytes = 0
        self._evicted = 0
        self._objects: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._losses = Losses()

    @property
    def caps(self) -> Caps:
        largest = max(0, self._size_bytes - ENTRY_BYTES)
        return Caps(name="memory", max_object_bytes=largest, tells_gone=True)

    def put(self, items: Sequence[Item]) -> list[Status]:
        return [self._put_one(item) for item in items]

    def _put_one(self, item: Item) -> Status:
        cost = num_bytes(item) + ENTRY_BYTES
        if cost > self._size_bytes:
            return Status.FULL
        value = b"".join(item.parts)
        with self._lock:
            if item.key in self._objects:
                return Status.OK
            while self._used_bytes + cost > self._size_bytes:
                evicted, old = self._objects.popitem(last=False)
                self._losses.add(evicted)
                self._used_bytes -= len(old) + ENTRY_BYTES
                self._evicted += 1
            self._objects[item.key] = value
            self._used_bytes += cost
        return Status.OK

    def get(self, items: Sequence[Item]) -> list[Status]:
        return [self._get_one(item) for item in items]

    def _get_one(self, item: Item) -> Status:
        with self._lock:
            value = self._objects.get(item.key)
            if value is None or len(value) != num_bytes(item):
                return Status.MISS
            self._objects.move_to_end(item.key)
        start = 0
        for part in item.parts:
            part[:] = value[start : start + len(part)]
            start += len(part)
        return Status.OK

    def probe(self, keys: Sequence[bytes]) -> list[Status]:
        return [Status.OK if key in self._objects else Status.MISS for key in keys]

    def drop(self, keys: Sequence[bytes]) -> list[Status]:
        with self._lock:
            for key in keys:
                value = self._objects.pop(key, None)
                if value is not None:
                    self._used_bytes -= len(value) + ENTRY_BYTES
        return [Status.OK] * len(keys)

    def gone(self, under_way: Callable[[bytes], bool]) -> Gone:
        with self._lock:
            return self._losses.take(self._objects.__contains__, under_way)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(
                objects=len(self._objects),
                used_bytes=self._used_bytes,
                capacity_bytes=self._size_bytes,
                evicted_objects=self._evicted,
            )

    def close(self) -> None:
        with self._lock:
            self._objects.clear()
            self._used_bytes = 0


def build(options: StoreOptions) -> MemoryBackend:
    """The backend `memory`: bounded by `size_bytes`, gone with the process."""
    return MemoryBackend(options.size_bytes)
