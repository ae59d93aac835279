"""Where weights are read from, one tensor at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from phloem.kernels.native_abi import WeightFormat
from phloem.kernels.quantised import BlockMatrix

__all__ = ["ALL", "Part", "WeightSource"]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows and columns of a matrix, first and last + 1; None: all of them. A vector has rows."""

    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """What is left of a tensor of that shape."""
        cuts = (self.rows, self.columns)
        pairs = zip(whole, cuts, strict=False)
        return tuple(size if cut is None else cut[1] - cut[0] for size, cut in pairs)


ALL = Part()


class WeightSource(Protocol):
    """An open checkpoint. Errors in the file are ConfigErrors of one line."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ConfigError if the tensor is missing."""
        ...

    def num_bytes(self, name: str) -> int:
        """Its size in the file, for progress."""
        ...

    def is_quantised(self, name: str) -> bool: ...

    def block_format(self, name: str) -> WeightFormat | None:
        """The format of its blocks, if they are ones that kernels read as they are."""
        ...

    def copy_to(self, name: str, out: Tensor, part: Part = ALL) -> None:
        """Write a part of the tensor into `out`, of its shape and any floating dtype."""
        ...

    def blocks(self, name: str, part: Part = ALL) -> BlockMatrix:
        """A copy of the blocks of a part of a matrix that has a block format."""
        ...

    def close(self) -> None: ...
