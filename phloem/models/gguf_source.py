"""Weights from a GGUF file, dequantised."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from phloem.config.gguf import GGUFTensor, read_gguf
from phloem.core.errors import ConfigError

__all__ = ["GGUFSource"]

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# Dequantised at once: bounds the temporaries of one tensor.
_BLOCK_BYTES = 16 << 20


class GGUFSource:
    """Reads by memory map. Plain types are views of the file; quantised ones become fp32."""

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

    def read(self, name: str) -> Tensor:
        info = self._info(name)
        kind = self._kind(info)
        size = self.num_bytes(name)
        if info.offset + size > len(self._map):
            raise ConfigError(f"{self._path} is cut short: {name} is incomplete")
        raw = np.frombuffer(self._map, dtype=np.uint8, count=size, offset=info.offset)
        if kind in _PLAIN:
            return torch.from_numpy(raw).view(_PLAIN[kind]).view(info.shape)
        rows = raw.reshape(math.prod(info.shape[:-1]), -1)
        out = torch.empty((rows.shape[0], info.shape[-1]), dtype=torch.float32)
        step = max(1, _BLOCK_BYTES // max(1, rows.shape[1]))
        try:
            for low in range(0, rows.shape[0], step):
                part = dequantize(rows[low : low + step], kind)
                out[low : low + step] = torch.from_numpy(np.ascontiguousarray(part))
        except NotImplementedError:
            raise ConfigError(f"{self._path}: {name} has type {kind.name}, not supported") from None
        return out.view(info.shape)

    def close(self) -> None:
        """The map goes with the last tensor that views it."""
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
