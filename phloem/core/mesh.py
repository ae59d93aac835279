"""The mesh of ranks: `tp` ranks compute the same tokens, `cp` such rows divide the tokens.

    rank = cp_index * tp + tp_index          tp 0     tp 1
                                     cp 0   rank 0   rank 1     a row: each rank has its heads and
                                     cp 1   rank 2   rank 3     its part of the weights

Owners of pages. Where the heads of the state are split over tp, the ranks of a row hold a page
between them, each its heads, in a slot that is the same for all: a row is one owner. Where all
heads share the state, every rank owns pages of its own, and nothing is held twice.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ONE_RANK", "Mesh", "ShardAxis"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the two axes."""

    tp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        assert self.tp >= 1, f"tp {self.tp}"
        assert self.cp >= 1, f"cp {self.cp}"

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.tp * self.cp

    def cp_index(self, rank: int) -> int:
        """The row of a rank: which tokens it computes."""
        return rank // self.tp

    def tp_index(self, rank: int) -> int:
        """The place of a rank in its row: which heads it computes. The first one samples."""
        return rank % self.tp

    def row_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that compute the same tokens as `rank`, itself included."""
        first = self.cp_index(rank) * self.tp
        return tuple(range(first, first + self.tp))


ONE_RANK = Mesh()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAxis:
    """The axis that owners of pages lie on: `ranks_per_owner` ranks hold a page between them, each
    a part of its heads. `kv/spec.py` says how many: tp, or 1."""

    mesh: Mesh
    ranks_per_owner: int

    @property
    def size(self) -> int:
        """How many owners there are."""
        return self.mesh.world // self.ranks_per_owner

    @property
    def owners_per_row(self) -> int:
        """Owners whose pages one row of the mesh computes: they follow one another."""
        return self.mesh.tp // self.ranks_per_owner

    def owner_of(self, rank: int) -> int:
        """The owner that `rank` is, or is a part of."""
        return rank // self.ranks_per_owner

    def part_of(self, rank: int) -> int:
        """Which part of the heads of its owner's pages a rank holds."""
        return rank % self.ranks_per_owner

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same part as `rank`, in order of their owners."""
        return tuple(range(self.part_of(rank), self.mesh.world, self.ranks_per_owner))
