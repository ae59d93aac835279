"""What the control side needs to know of the tiers below the device; built by the data side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phloem.core.store import PageStore, StoreStats
from phloem.core.transfer import Transfers
from phloem.kv.keys import KeyFacts

__all__ = ["StoragePort", "TierParts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePort:
    """Where a store is plugged in and out; called by the loop's thread."""

    attach: Callable[[PageStore], None]
    detach: Callable[[], None]
    attached: Callable[[], bool]
    stats: Callable[[], StoreStats | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierParts:
    """Mover, sizes and identity. `close` gives back the mover's threads (after the worker's)."""

    transfers: Transfers
    num_host_pages: int
    page_bytes: int
    key_facts: KeyFacts
    storage: StoragePort
    close: Callable[[], None]
