"""Byte layout of a page pool, by axis order.

A layout's name is its axis order; shape and strides are derived from it and written nowhere else.

    page   head_group   layer   k/v   token   head   dim
    `---- one page is contiguous: a page is one memcpy ----'
           `-- one object = (page, head_group): what storage and tensor parallelism cut --'

Every axis that may ever be partitioned (page, head group, layer) lies outside the token axis. The
k/v axis has one place in MLA, whose rows are the latent and the rotary key of a token, of no head.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from phloem.core.errors import ConfigError
from phloem.core.mesh import ShardAxis
from phloem.kv.spec import KVSpec

__all__ = ["Axis", "PageLayout", "default_head_groups"]

MAX_HEAD_GROUPS = 8


class Axis(enum.Enum):
    """An axis of a page pool."""

    PAGE = "page"
    HEAD_GROUP = "head_group"
    LAYER = "layer"
    KV = "kv"
    TOKEN = "token"
    HEAD = "head"
    DIM = "dim"


ORDER = (
    Axis.PAGE,
    Axis.HEAD_GROUP,
    Axis.LAYER,
    Axis.KV,
    Axis.TOKEN,
    Axis.HEAD,
    Axis.DIM,
)


def default_head_groups(num_kv_heads: int) -> int:
    """The largest divisor of the KV heads that is at most 8: every usual TP degree divides it."""
    return max(n for n in range(1, MAX_HEAD_GROUPS + 1) if num_kv_heads % n == 0)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Sizes of the axes of a pool of `num_pages` pages."""

    spec: KVSpec
    num_pages: int
    num_head_groups: int

    def __post_init__(self) -> None:
        if self.num_head_groups < 1 or self.spec.num_kv_heads % self.num_head_groups:
            raise ConfigError(
                f"{self.num_head_groups} head groups do not divide "
                f"{self.spec.num_kv_heads} KV heads"
            )

    def groups_of(self, axis: ShardAxis, rank: int) -> tuple[int, int]:
        """First and last + 1 of the head groups that a rank holds of its owner's pages."""
        assert self.num_head_groups % axis.ranks_per_owner == 0, "the model was checked"
        each = self.num_head_groups // axis.ranks_per_owner
        low = axis.part_of(rank) * each
        return low, low + each

    def of_one_rank(self, axis: ShardAxis) -> PageLayout:
        """The pages of a rank that shares no memory with the others of its owner: as many, each of
        its own heads alone. The same for all; side by side, in order of parts, they are a page."""
        each = axis.ranks_per_owner
        assert self.num_head_groups % each == 0, "the model was checked"
        spec = replace(self.spec, num_kv_heads=self.spec.num_kv_heads // each)
        return PageLayout(spec, self.num_pages, self.num_head_groups // each)

    @property
    def heads_per_group(self) -> int:
        return self.spec.num_kv_heads // self.num_head_groups

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in axis order: (page, head_group, layer, kv, token, head, dim); dim in bytes where
        rows are packed."""
        spec = self.spec
        sizes = {
            Axis.PAGE: self.num_pages,
            Axis.HEAD_GROUP: self.num_head_groups,
            Axis.LAYER: spec.num_layers,
            Axis.KV: spec.num_sides,
            Axis.TOKEN: spec.page_size,
            Axis.HEAD: self.heads_per_group,
            Axis.DIM: spec.row_items,
        }
        return tuple(sizes[axis] for axis in ORDER)

    @property
    def object_bytes(self) -> int:
        """Bytes of one object: one head group of one page, contiguous."""
        return self.spec.page_bytes // self.num_head_groups

    @property
    def total_bytes(self) -> int:
        return self.spec.page_bytes * self.num_pages

    def object_offset(self, slot: int, head_group: int) -> int:
        """Byte offset of an object in the pool."""
        return slot * self.spec.page_bytes + head_group * self.object_bytes
