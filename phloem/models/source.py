"""Where weights are read from, one tensor at a time."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

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

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, in a floating dtype. It may be backed by the file."""
        ...

    def close(self) -> None: ...
