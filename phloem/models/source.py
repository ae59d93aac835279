"""Where weights are read from, one tensor at a time."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from phloem.kernels.native_abi import WeightFormat
from phloem.kernels.quantised import BlockMatrix

__all__ = ["WeightSource"]


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

    def copy_to(self, name: str, out: Tensor) -> None:
        """Write the tensor into `out`, of its shape and any floating dtype."""
        ...

    def blocks(self, name: str) -> BlockMatrix:
        """A copy of the blocks of a matrix that has a block format."""
        ...

    def close(self) -> None: ...
