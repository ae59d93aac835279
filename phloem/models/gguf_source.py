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

    def copy_to(self, name: str, out: Tensor) -> None:
        info = self._info(name)
        self._copy(info, self._raw(name, info), out)
        self._forget(info)

    def _copy(self, info: GGUFTensor, raw: npt.NDArray[np.uint8], out: Tensor) -> None:
        kind = self._kind(info)
        if kind in _PLAIN:
            out.copy_(torch.from_numpy(raw).view(_PLAIN[kind]).view(info.shape))
            return
        rows = raw.reshape(math.prod(info.shape[:-1]), -1)
        target = out.view(rows.shape[0], info.shape[-1])
        step = max(1, _BLOCK_BYTES // max(1, rows.shape[1]))
        try:
            for low in range(0, rows.shape[0], step):
                target[low : low + step] = _dequantise(rows[low : low + step], kind)
        except NotImplementedError:
            raise ConfigError(
                f"{self._path}: {info.name} has type {kind.name}, not supported"
            ) from None

    def blocks(self, name: str) -> BlockMatrix:
        info = self._info(name)
        raw = self._raw(name, info).reshape(info.shape[0], -1).copy()
        self._forget(info)
        return BlockMatrix(torch.from_numpy(raw), _BLOCKS[self._kind(info)])

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
