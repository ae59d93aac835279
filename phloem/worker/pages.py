"""The pages of a worker by component: specs, how many there are, pools, and the tiers below."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from phloem.config.model import ModelConfig
from phloem.core.clock import MonotonicClock
from phloem.core.errors import ConfigError
from phloem.kv.layout import PageLayout, default_head_groups
from phloem.kv.sizing import num_pages_for
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.pools import DevicePool, HostArena
from phloem.transfer import (
    APART_CHUNK_BYTES,
    Holder,
    TransferEngine,
    TransferHooks,
    memory_of,
    tell_loads,
)
from phloem.worker.peers import RankPlace

__all__ = ["host_tier", "kv_specs", "make_pools", "page_counts", "pool_layouts"]


def kv_specs(config: ModelConfig, *, dtype: KVDtype, page_size: int) -> tuple[KVSpec, ...]:
    """The KV state of a model by component: full, and window if some layers have one.

    Full has no layers, and so no bytes, where all layers have a window.
    """
    if config.mla is not None:
        latent = KVSpec(
            kind=AttentionKind.MLA,
            dtype=dtype,
            num_layers=config.num_layers,
            num_kv_heads=1,
            head_dim=config.mla.row_dim,
            rope_dim=config.mla.rope_dim,
            page_size=page_size,
        )
        return (latent,)
    retentions = (None, config.window)
    return tuple(
        KVSpec(
            kind=AttentionKind.GQA,
            dtype=dtype,
            num_layers=len(layers),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            retention=retention,
        )
        for layers, retention in zip(config.component_layers, retentions, strict=False)
    )


def page_counts(
    specs: Sequence[KVSpec],
    *,
    num_pages: int | None,
    window_pages: int | None,
    kv_bytes: int | None,
) -> tuple[int, ...]:
    """Pages of each component's pool. Raises ConfigError for figures that cannot be."""
    if (num_pages is None) == (kv_bytes is None):
        raise ConfigError("give either num_pages or kv_bytes")
    if len(specs) == 1:
        if window_pages is not None:
            raise ConfigError("window_pages was given, but no layer of the model has a window")
        if kv_bytes is not None:
            return (num_pages_for(specs[0], kv_bytes),)
    elif kv_bytes is not None:
        raise ConfigError("a model with sliding windows needs num_pages and window_pages")
    assert num_pages is not None, "checked above"
    counts = (num_pages, num_pages if window_pages is None else window_pages)[: len(specs)]
    for name, count in zip(("num_pages", "window_pages"), counts, strict=False):
        if count < 1:
            raise ConfigError(f"{name} must be at least 1, got {count}")
    return counts


def pool_layouts(specs: Sequence[KVSpec], counts: Sequence[int]) -> tuple[PageLayout, ...]:
    """How the pages of each component lie in one owner's pool."""
    return tuple(
        PageLayout(spec, count, default_head_groups(spec.num_kv_heads))
        for spec, count in zip(specs, counts, strict=True)
    )


def make_pools(
    specs: Sequence[KVSpec],
    counts: Sequence[int],
    device: torch.device,
    *,
    dtype: torch.dtype,
    place: RankPlace | None = None,
) -> tuple[DevicePool, ...]:
    """The device pool of each component, computed in `dtype`.

    Who shares no memory with the ranks that have other heads of its pages has a pool of its own
    heads alone. Raises ConfigError if the memory does not suffice.
    """
    layouts = pool_layouts(specs, counts)
    if place is None:
        return tuple(DevicePool(layout, device=device, dtype=dtype) for layout in layouts)
    axis, rank = place.axis, place.peers.rank
    if place.pools is None:
        return tuple(
            DevicePool(
                layout.of_one_rank(axis), device=device, dtype=dtype, first_owner=place.owner
            )
            for layout in layouts
        )
    return tuple(
        DevicePool(
            layout,
            device=device,
            dtype=dtype,
            num_owners=axis.size,
            memory=memory,
            groups=layout.groups_of(axis, rank),
        )
        for layout, memory in zip(layouts, place.pools, strict=True)
    )


def host_tier(
    specs: Sequence[KVSpec],
    pools: Sequence[DevicePool],
    layers: Sequence[Sequence[int]],
    counts: Sequence[int],
    hooks: TransferHooks | None,
    place: RankPlace | None = None,
) -> tuple[tuple[HostArena, ...], TransferEngine | None]:
    """An arena of `counts[c]` pages for each component, and what moves pages; none with 0 pages.

    `layers[c]`: the model's numbers of the layers of component c. `place`: if it has links, these
    pools are one rank's alone, and the others are told of loads. Pages of the host are whole.
    """
    if min(counts) < 0:
        raise ConfigError(f"host_pages must be at least 0, got {min(counts)}")
    if counts[0] == 0:
        return (), None
    arenas = tuple(
        HostArena(layout, arena_id=component)
        for component, layout in enumerate(pool_layouts(specs, counts))
    )
    links = () if place is None else place.links
    memories = [
        memory_of(pool, arena, numbers, component=c, holders=_holders(place, arena.layout))
        for c, (pool, arena, numbers) in enumerate(zip(pools, arenas, layers, strict=True))
    ]
    engine = TransferEngine(
        memories,
        MonotonicClock(),
        hooks=hooks,
        chunk_bytes=APART_CHUNK_BYTES if links else None,
        on_loads=partial(tell_loads, links) if links else None,
    )
    return arenas, engine


def _holders(place: RankPlace | None, layout: PageLayout) -> list[Holder]:
    """What each other rank that has a link holds of whole pages in this layout."""
    if place is None:
        return []
    holders = []
    for rank, link in enumerate(place.links, 1):
        first, end = layout.groups_of(place.axis, rank)
        owner = place.axis.owner_of(rank)
        holders.append(Holder(link=link, owner=owner, first_group=first, end_group=end))
    return holders
