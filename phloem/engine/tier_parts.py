"""What the control side needs to know of the tiers below the device; built by the data side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from phloem.core.store import Gone, PageStore, StoreStats
from phloem.core.transfer import Transfers
from phloem.kv.keys import KeyFacts

__all__ = ["SHUTDOWN_FLUSH_S", "ModelSlot", "StorageOpener", "StoragePort", "TierParts"]

# An orderly shutdown waits so long for pages that are not in storage yet.
SHUTDOWN_FLUSH_S = 20.0

StorageOpener: TypeAlias = Callable[[str, int], PageStore]  # directory, bytes; blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePort:
    """Where a store is plugged in and out; called by the loop's thread."""

    attach: Callable[[PageStore], None]
    detach: Callable[[], None]
    attached: Callable[[], bool]
    stats: Callable[[], StoreStats | None]
    take_gone: Callable[[], Gone]  # what it has lost since the last call


@dataclass(frozen=True, slots=True, kw_only=True)
class TierParts:
    """Mover, sizes and identity. `close` gives back the mover's threads (after the worker's).

    `num_host_window_pages` and `window_page_bytes` are of the window component, 0 without one.
    """

    transfers: Transfers
    num_host_pages: int
    page_bytes: int
    key_facts: KeyFacts
    storage: StoragePort
    close: Callable[[], None]
    open_storage: StorageOpener
    clear_directory: Callable[[str], None]  # that nobody uses now
    num_host_window_pages: int = 0
    window_page_bytes: int = 0
    storage_at: tuple[str, int] | None = None  # directory and bytes of what is attached at start


@dataclass(frozen=True, slots=True)
class ModelSlot:
    """The weights that are served. `load(path)` blocks and returns what puts them in place, to be
    called by the loop's thread while no step is in flight; that returns who they are. Raises
    ConfigError."""

    load: Callable[[str], Callable[[], KeyFacts]]
