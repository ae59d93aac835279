"""What the engine knows of one component: its host arena, its copier, its layers in the model."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from phloem.kv.spec import KVSpec
from phloem.pools import DevicePool, HostArena
from phloem.transfer.apart import ApartCopier, Holder
from phloem.transfer.copier import Copier, make_copier

__all__ = ["ComponentMemory", "layers_needed", "memory_of"]


def layers_needed(layers: Sequence[int], layer: int) -> int:
    """How many of a component's `layers` (the model's numbers, rising) must have been loaded before
    the model's `layer` can be computed; 0 if that layer reads none of its pages."""
    index = bisect.bisect_left(layers, layer)
    if index == len(layers) or layers[index] != layer:
        return 0
    return index + 1


@dataclass(frozen=True, slots=True)
class ComponentMemory:
    """Pages of one component on both sides. `layers`: the model's numbers of its layers, rising.

    `pages_per_owner`: of each pool, where the device memory is that of several ranks; 0: of one.
    """

    arena: HostArena
    copier: Copier
    layers: tuple[int, ...]
    pages_per_owner: int = 0

    def __post_init__(self) -> None:
        count = self.spec.num_layers
        rising = all(a < b for a, b in zip(self.layers, self.layers[1:], strict=False))
        if len(self.layers) != count or not rising:
            raise ValueError(f"{count} layers of a component are not {self.layers}")

    @property
    def spec(self) -> KVSpec:
        return self.arena.layout.spec

    @property
    def name(self) -> str:
        return self.spec.component().name

    def needed(self, layer: int) -> int:
        """See `layers_needed`."""
        return layers_needed(self.layers, layer)


def memory_of(
    pool: DevicePool,
    arena: HostArena,
    layers: Sequence[int] | None = None,
    *,
    component: int = 0,
    holders: Sequence[Holder] = (),
) -> ComponentMemory:
    """The memory of a component whose layers have these numbers in the model; all, if None.

    `holders`: the other ranks, where what they hold of pages is not mapped here.
    """
    spec = arena.layout.spec
    numbers = tuple(range(spec.num_layers)) if layers is None else tuple(layers)
    copier = make_copier(pool, arena)
    if holders and spec.page_bytes:
        copier = ApartCopier(
            copier, arena, component=component, pages_per_owner=pool.num_pages, holders=holders
        )
    pages_per_owner = pool.num_pages if spec.page_bytes else 0
    return ComponentMemory(arena, copier, numbers, pages_per_owner)
