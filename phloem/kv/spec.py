"""KV specs: the one place that knows attention kinds and KV dtypes.

Everything above sees pages, components (described by their retention) and bytes per page.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from phloem.core.errors import ConfigError
from phloem.core.mesh import Mesh, ShardAxis

__all__ = ["FP4_BLOCK", "AttentionKind", "ComponentSpec", "KVDtype", "KVSpec"]

FP4_BLOCK = 16  # numbers to a scale, along the head dimension
_SCALE_BYTES = 2  # int8 and fp8: bf16, one of each part of a row


class AttentionKind(enum.Enum):
    """How a layer's state is shaped. GQA covers MHA (groups of one) and MQA (one group).

    MLA keeps one row of a token that all heads share, instead of K and V: a latent of which both
    are made, and behind it the key's rotary part.
    """

    GQA = "gqa"
    MLA = "mla"


class KVDtype(enum.Enum):
    """How the numbers of K and V are stored.

    The packed ones are codes with scales of their own row (token, head, K or V): int8; fp8 (e4m3);
    fp4 (e2m1, a scale for every 16). Never of a page, which would depend on chunking, nor of
    several heads, which would depend on how they are split.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"
    FP4 = "fp4"

    @property
    def is_packed(self) -> bool:
        """Whether rows are bytes of codes and scales, instead of numbers."""
        return self in (KVDtype.INT8, KVDtype.FP8, KVDtype.FP4)

    def part_bytes(self, width: int) -> int:
        """Bytes of `width` numbers that lie together, with their scales."""
        if self is KVDtype.FP4:
            return width // 2 + width // FP4_BLOCK
        return {
            KVDtype.FP32: 4 * width,
            KVDtype.BF16: 2 * width,
            KVDtype.INT8: width + _SCALE_BYTES,
            KVDtype.FP8: width + _SCALE_BYTES,
        }[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSpec:
    """A kind of cached state with its own life on the same tokens.

    `retention` is the number of last tokens that later tokens may read, the token itself included;
    None means all of them.
    """

    name: str
    retention: int | None
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """The KV state of one component's layers, all alike.

    `retention`: of how many last tokens, the token itself included, later ones may read the state;
    None: of all. A model all of whose layers have a window has a full component of no layers and
    no bytes: the spine on which windows hang. `rope_dim`: how many of MLA's head_dim are the rotary
    part, the last ones.
    """

    kind: AttentionKind
    dtype: KVDtype
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    retention: int | None = None
    rope_dim: int = 0

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_layers < 0:
            raise ConfigError(f"num_layers must not be negative, got {self.num_layers}")
        if self.retention is not None and self.retention < 1:
            raise ConfigError(f"a window must be at least 1 token, got {self.retention}")
        if self.kind is AttentionKind.MLA:
            self._check_latent()
        elif self.rope_dim:
            raise ConfigError(f"a rotary part of {self.rope_dim} is kept apart in a latent only")
        if self.dtype is KVDtype.FP4 and any(width % FP4_BLOCK for width in self.parts):
            raise ConfigError(
                f"KV pages in fp4 have a scale for {FP4_BLOCK} numbers, which does not divide rows "
                f"of {' and '.join(map(str, self.parts))}; use --kv-dtype fp8 or int8"
            )
        if self.dtype.is_packed and any(width % 2 for width in self.parts):
            raise ConfigError(f"KV pages in {self.dtype.value} need rows of even length")

    def _check_latent(self) -> None:
        if self.num_kv_heads != 1 or self.retention is not None:
            raise ConfigError("a latent is of one head, and kept for all tokens")
        if not 0 < self.rope_dim < self.head_dim:
            raise ConfigError(
                f"a rotary part of {self.rope_dim} does not fit a row of {self.head_dim}"
            )

    @property
    def num_sides(self) -> int:
        """Rows of a token in each layer and head: K and V, or the latent alone."""
        return 1 if self.kind is AttentionKind.MLA else 2

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers of each part of a row that has scales of its own: the rotary part is one."""
        if self.kind is AttentionKind.MLA:
            return (self.head_dim - self.rope_dim, self.rope_dim)
        return (self.head_dim,)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: of a token, in one layer, of one head, K or V."""
        return sum(self.dtype.part_bytes(width) for width in self.parts)

    @property
    def row_items(self) -> int:
        """Items of a row in a pool's tensor: its numbers, or, if they are packed, its bytes."""
        return self.row_bytes if self.dtype.is_packed else self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's state over all layers and heads."""
        return self.num_sides * self.num_layers * self.num_kv_heads * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and heads."""
        return self.token_bytes * self.page_size

    def shard_axis(self, mesh: Mesh) -> ShardAxis:
        """Who owns pages: a row of the mesh, whose ranks hold their heads of each; or, since all
        heads share a latent, each rank."""
        per_owner = 1 if self.kind is AttentionKind.MLA else mesh.tp
        return ShardAxis(mesh=mesh, ranks_per_owner=per_owner)

    def component(self) -> ComponentSpec:
        """What the control plane may know of it."""
        name = "full" if self.retention is None else "window"
        return ComponentSpec(name=name, retention=self.retention, num_layers=self.num_layers)
