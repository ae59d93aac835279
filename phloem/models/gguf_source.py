"""Weights from a GGUF file: dequantised, or their blocks as they are."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from phloem.config.gguf import GGUFTensor, read_gguf
from phloem.core.errors import ConfigError
from phloem.kernels.native_abi import WeightFormat
from phloem.kernels.quantised import BlockMatrix
from phloem.models.source import ALL, Part

__all__ = ["GGUFSource"]

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_BLOCKS = {
    GGMLQuantizationType.Q4_0: WeightFormat.Q4_0,
    GGMLQuantizationType.Q4_1: WeightFormat.Q4_1,
    GGMLQuantizationType.Q8_0: WeightFormat.Q8_0,
}
# Dequantised at once: bounds the temporaries of one tensor.
_BLOCK_BYTES = 4 << 20


class GGUFSource:
    """Reads by memory map."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors = read_gguf(path).tensors
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def num_bytes(self, name: str) -> int:
        info = self._info(name)
        per_block, block_bytes = GGML_QUANT_SIZES[self._kind(info)]
        if info.shape and info.shape[-1] % per_block:
            raise ConfigError(
                f"{self._path}: {name} of shape {info.shape} is no multiple of a block"
            )
        return math.prod(info.shape) // per_block * block_bytes

    def is_quantised(self, name: str) -> bool:
        return self._kind(self._info(name)) not in _PLAIN

    def block_format(self, name: str) -> WeightFormat | None:
        return _BLOCKS.get(self._kind(self._info(name)))

    def copy_to(self, name: str, out: Tensor, part: Part = ALL) -> None:
        info = self._info(name)
        self._copy(info, self._rows(name, info, part), out)
        self._forget(info)

    def _copy(self, info: GGUFTensor, rows: npt.NDArray[np.uint8], out: Tensor) -> None:
        kind = self._kind(info)
        if kind in _PLAIN:
            dense = torch.from_numpy(np.ascontiguousarray(rows))
            out.copy_(dense.view(_PLAIN[kind]).view(out.shape))
            return
        target = out.view(rows.shape[0], -1)
        step = max(1, _BLOCK_BYTES // max(1, rows.shape[1]))
        try:
            for low in range(0, rows.shape[0], step):
                target[low : low + step] = _dequantise(rows[low : low + step], kind)
        except NotImplementedError:
            raise ConfigError(
                f"{self._path}: {info.name} has type {kind.name}, not supported"
            ) from None

    def blocks(self, name: str, part: Part = ALL) -> BlockMatrix:
        info = self._info(name)
        raw = self._rows(name, info, part).copy()
        self._forget(info)
        return BlockMatrix(torch.from_numpy(raw), _BLOCKS[self._kind(info)])

    def _rows(self, name: str, info: GGUFTensor, part: Part) -> npt.NDArray[np.uint8]:
        """The bytes of a part, row by row: a view. A vector is one row, of which rows are columns.

        Raises ConfigError where a block would be cut.
        """
        rows = self._raw(name, info).reshape(math.prod(info.shape[:-1]), -1)
        of_row, columns = part.rows, part.columns
        if len(info.shape) == 1:
            of_row, columns = None, part.rows
        if of_row is not None:
            rows = rows[slice(*of_row)]
        if columns is None:
            return rows
        per_block, block_bytes = GGML_QUANT_SIZES[self._kind(info)]
        if any(column % per_block for column in columns):
            raise ConfigError(
                f"{self._path}: {name} is in blocks of {per_block} weights, which parts of "
                f"{columns[1] - columns[0]} columns would cut; use another --tp"
            )
        low, high = (column // per_block * block_bytes for column in columns)
        return rows[:, low:high]

    def _raw(self, name: str, info: GGUFTensor) -> npt.NDArray[np.uint8]:
        size = self.num_bytes(name)
        if info.offset + size > len(self._map):
            raise ConfigError(f"{self._path} is cut short: {name} is incomplete")
        return np.frombuffer(self._map, dtype=np.uint8, count=size, offset=info.offset)

    def _forget(self, info: GGUFTensor) -> None:
        """Let go of the tensor's part of the map, so that no file counts beside its copy."""
        start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(
            mmap.MADV_DONTNEED, start, info.offset - start + self.num_bytes(info.name)
        )

    def close(self) -> None:
        """The map goes with this object: nothing that was read views it."""
        self._tensors = {}

    def _info(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise ConfigError(f"{self._path} has no tensor {name}")
        return self._tensors[name]

    def _kind(self, info: GGUFTensor) -> GGMLQuantizationType:
        try:
            return GGMLQuantizationType(info.type_id)
        except ValueError:
            raise ConfigError(
                f"{self._path}: {info.name} has unknown type {info.type_id}"
            ) from None


def _dequantise(rows: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> Tensor:
    """The weights of some rows, fp32. NotImplementedError for a type that `gguf` does not know."""
    if kind in _BLOCKS:  # the same values, in a third of the time
        return BlockMatrix(torch.from_numpy(rows.copy()), _BLOCKS[kind]).dequantise()
    return torch.from_numpy(np.ascontiguousarray(dequantize(rows, kind)))
