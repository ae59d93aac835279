"""Matrices in GGUF blocks of 32 weights, and what the blocks mean: the oracle of q4 and int8.

    Q4_0   fp16 d, 16 bytes of nibbles          w = d (q - 8)
    Q4_1   fp16 d, fp16 m, 16 bytes of nibbles  w = d q + m
    Q8_0   fp16 d, 32 int8                      w = d q

Byte i of the nibbles holds weight i in its low and weight i + 16 in its high half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phloem.kernels.native_abi import PANEL, WeightFormat

__all__ = ["BLOCK_BYTES", "BLOCK_WEIGHTS", "BlockMatrix"]

BLOCK_WEIGHTS = 32
BLOCK_BYTES = {WeightFormat.Q4_0: 18, WeightFormat.Q4_1: 20, WeightFormat.Q8_0: 34}


@dataclass(frozen=True, slots=True, eq=False)
class BlockMatrix:
    """A matrix (n, k). `raw` (n, bytes of a row), uint8, contiguous; rows can be moved freely."""

    raw: Tensor
    format: WeightFormat

    def __post_init__(self) -> None:
        if self.raw.ndim != 2 or self.raw.shape[1] % BLOCK_BYTES[self.format]:
            raise ValueError(f"{tuple(self.raw.shape)} bytes are no rows of {self.format.name}")

    @property
    def shape(self) -> tuple[int, int]:
        n, width = self.raw.shape
        return n, width // BLOCK_BYTES[self.format] * BLOCK_WEIGHTS

    def rows(self, raw: Tensor) -> BlockMatrix:
        """Other rows in the same format."""
        return replace(self, raw=raw.contiguous())

    @staticmethod
    def stack(parts: Sequence[BlockMatrix]) -> BlockMatrix:
        """One below the other. All must have one format."""
        if len({part.format for part in parts}) != 1:
            raise ValueError("blocks of several formats cannot be stacked")
        return parts[0].rows(torch.cat([part.raw for part in parts]))

    @staticmethod
    def alternate(first: BlockMatrix, second: BlockMatrix) -> BlockMatrix:
        """16 rows of each in turn, as native kernels take gate and up."""
        n = first.shape[0]
        if second.format is not first.format or second.shape != first.shape or n % PANEL:
            raise ValueError("gate and up must be alike, with a multiple of 16 rows")
        panels = [part.raw.view(n // PANEL, PANEL, -1) for part in (first, second)]
        return first.rows(torch.cat(panels, dim=1).view(2 * n, -1))

    def dequantise(self) -> Tensor:
        """The weights, exactly (n, k), fp32."""
        n, k = self.shape
        blocks = self.raw.view(-1, BLOCK_BYTES[self.format])
        d = blocks[:, :2].contiguous().view(torch.float16).float()
        if self.format is WeightFormat.Q8_0:
            return (d * blocks[:, 2:].contiguous().view(torch.int8)).view(n, k)
        nibbles = blocks[:, -BLOCK_WEIGHTS // 2 :]
        q = torch.cat((nibbles & 15, nibbles >> 4), dim=1).float()
        if self.format is WeightFormat.Q4_0:
            return (d * (q - 8)).view(n, k)
        m = blocks[:, 2:4].contiguous().view(torch.float16).float()
        return (d * q + m).view(n, k)
