"""The tiers below the device, as the real core builds them: host arena, transfers, store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from phloem.config import Config
from phloem.config.units import format_bytes
from phloem.core.clock import MonotonicClock
from phloem.core.errors import ConfigError
from phloem.core.store import PageStore
from phloem.engine.identity import key_facts
from phloem.engine.resources import available_memory_bytes
from phloem.engine.tier_parts import StoragePort, TierParts
from phloem.kv.keys import KeyFacts
from phloem.kv.sizing import PoolDemand, pool_pages
from phloem.kv.spec import KVSpec
from phloem.stores import StoreOptions, open_store
from phloem.stores.adapters.segment.inspect import DirectoryView
from phloem.worker import LoadedWorker, pool_layouts

__all__ = ["clear_directory", "host_pages", "loaded_key_facts", "open_storage", "tier_parts"]

logger = logging.getLogger(__name__)

# Host memory when storage needs some and the user names none: twice the device's, within reason.
_AUTO_RATIO = 2
_AUTO_SHARE = 0.25
_AUTO_UNKNOWN_BYTES = 1 << 30
# The loop stands still for a store that is detached while it serves: a hung one is left behind.
LIVE_DETACH_S = 0.25


def host_pages(
    config: Config, specs: Sequence[KVSpec], *, device_bytes: int, demand: PoolDemand | None = None
) -> tuple[int, ...]:
    """Pages of each component's host arena; zeros for none. Raises ConfigError if the memory cannot
    hold one of each.

    `demand`: what the device pools were sized for, where some layers have a window. Nobody runs on
    the host, so its window pages are those of the tails of what its full pages hold.
    """
    asked = config.tiers.host_memory_bytes
    if asked == 0:
        return (0,) * len(specs)
    least = sum(spec.page_bytes for spec in specs)
    if asked is None:
        available = available_memory_bytes()
        room = _AUTO_UNKNOWN_BYTES if available is None else int(available * _AUTO_SHARE)
        asked = max(least, min(_AUTO_RATIO * device_bytes, room))
    if asked < least:
        raise ConfigError(f"--host-memory of {asked:,} bytes holds no KV page of {least:,} bytes")
    if len(specs) == 1:
        return (asked // least,)
    assert demand is not None, "the device pools of two components were sized for something"
    return pool_pages(specs, asked, replace(demand, max_running=0, max_prefill_tokens=0))


def loaded_key_facts(path: Path, loaded: LoadedWorker, *, weight_quantisation: str) -> KeyFacts:
    """What tells the pages of the checkpoint at `path` apart: whole ones, whatever a rank holds."""
    layouts = pool_layouts(loaded.specs, loaded.num_pages)
    window = layouts[1] if len(layouts) > 1 else None
    return key_facts(
        path,
        loaded.config,
        layouts[0],
        window=window,
        weight_quantisation=weight_quantisation,
    )


def open_storage(directory: str, size_bytes: int) -> PageStore:
    """The segment store in `directory`. Raises ConfigError if it cannot be used. Blocks."""
    options = StoreOptions(
        location=str(Path(directory).expanduser()),
        size_bytes=size_bytes,
    )
    store = open_store("segment", options, MonotonicClock())
    stats = store.stats()
    logger.info(
        "storage %s: %d objects, %s", directory, stats.objects, format_bytes(stats.used_bytes)
    )
    return store


def clear_directory(directory: str) -> None:
    """Remove everything in a storage directory. Raises ConfigError while somebody uses it."""
    view = DirectoryView(str(Path(directory).expanduser()))
    try:
        view.clear()
    finally:
        view.close()


def tier_parts(config: Config, loaded: LoadedWorker, path: Path) -> TierParts | None:
    """None without a host tier. Attaches the store that the settings name."""
    transfers, hosts = loaded.transfers, loaded.hosts
    if transfers is None:
        return None
    storage = transfers.storage
    window = hosts[1] if len(hosts) > 1 else None

    def close() -> None:
        transfers.close()
        for host in hosts:
            host.close()

    if config.tiers.storage is not None:
        storage.attach(open_storage(config.tiers.storage, config.tiers.storage_size_bytes))
    return TierParts(
        transfers=transfers,
        num_host_pages=hosts[0].num_pages,
        num_host_window_pages=0 if window is None else window.num_pages,
        page_bytes=loaded.page_bytes,
        window_page_bytes=0 if window is None else window.layout.spec.page_bytes,
        key_facts=loaded_key_facts(path, loaded, weight_quantisation=config.model.quantization),
        storage=StoragePort(
            attach=storage.attach,
            detach=partial(storage.detach, LIVE_DETACH_S),
            attached=lambda: storage.attached,
            stats=storage.stats,
            take_gone=storage.take_gone,
        ),
        close=close,
        open_storage=open_storage,
        clear_directory=clear_directory,
        storage_at=None
        if config.tiers.storage is None
        else (config.tiers.storage, config.tiers.storage_size_bytes),
    )
