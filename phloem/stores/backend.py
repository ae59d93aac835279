"""What a storage backend has to do: plain blocking batches. Everything else is above it.

        controller                                     one thread
            |  submit / poll
        GuardedStore    breaker, negative cache        (guard.py)
            |
        ThreadedStore   threads, deadlines, quarantine (threaded.py)
    --------|-------------------------------------------- many threads below
        SealedBackend   checksum, unless caps.verifies (seal.py)
            |
        [FaultyBackend] tests                          (faulty.py)
            |
        a Backend       memory, segment, ...

A backend whose client is natively asynchronous may implement `core.store.PageStore` itself instead
and take ThreadedStore's place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from phloem.core.store import Caps, Gone, Status

__all__ = ["Backend", "Item", "StoreOptions", "Usage", "num_bytes"]


class Item(NamedTuple):
    """One object: its key and the buffers that are its bytes, in order."""

    key: bytes
    parts: tuple[memoryview, ...]


def num_bytes(item: Item) -> int:
    """The object's length."""
    parts = item.parts
    return len(parts[0]) if len(parts) == 1 else sum(map(len, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a backend holds; becomes part of StoreStats."""

    objects: int
    used_bytes: int
    capacity_bytes: int
    evicted_objects: int = 0
    details: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What a backend is opened with."""

    location: str = ""  # a directory, or an address
    size_bytes: int = 0
    num_threads: int = 4
    sync: bool = False  # a put that is OK survives a loss of power, not only of the process


class Backend(Protocol):
    """Blocking batches, called from several threads at once; one status per item, in order.

    May raise OSError or the client's own errors: the caller turns them into ERROR for all items,
    so a backend raises only if it has published nothing of the batch. Buffers belong to the caller
    again when the call returns.
    """

    @property
    def caps(self) -> Caps: ...

    def put(self, items: Sequence[Item]) -> list[Status]: ...

    def get(self, items: Sequence[Item]) -> list[Status]: ...

    def probe(self, keys: Sequence[bytes]) -> list[Status]: ...

    def drop(self, keys: Sequence[bytes]) -> list[Status]: ...

    def gone(self, under_way: Callable[[bytes], bool]) -> Gone:
        """What went since the last call, except by `drop`, as far as it has not come back.

        Keys that are `under_way` are kept for a later call. Must not block on I/O. Nothing, for
        ever, unless `caps.tells_gone`.
        """
        ...

    def usage(self) -> Usage:
        """Must not block on I/O."""
        ...

    def close(self) -> None: ...
