"""Weights from a Hugging Face folder: one `model.safetensors`, or shards with an index."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phloem.core.errors import ConfigError
from phloem.kernels.native_abi import WeightFormat
from phloem.kernels.quantised import BlockMatrix
from phloem.models.source import ALL, Part

__all__ = ["SafetensorsSource"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_BITS = {"F32": 32, "F16": 16, "BF16": 16}


class SafetensorsSource:
    """Reads by memory map, so a tensor costs memory only once it is used."""

    def __init__(self, folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        self._home: dict[str, Any] = {}
        self._folder = folder
        try:
            self._open_all(folder)
        except BaseException:
            self._stack.close()
            raise

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def num_bytes(self, name: str) -> int:
        part = self._slice(name)
        shape: list[int] = part.get_shape()
        return math.prod(shape) * self._bits(name, part.get_dtype()) // 8

    def is_quantised(self, name: str) -> bool:  # noqa: ARG002
        return False  # `copy_to` refuses what is no float

    def block_format(self, name: str) -> WeightFormat | None:  # noqa: ARG002
        return None

    def copy_to(self, name: str, out: Tensor, part: Part = ALL) -> None:
        self._bits(name, self._slice(name).get_dtype())
        try:
            tensor = self._read(name, part)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ConfigError(f"{self._folder}: cannot read {name}: {error}") from error
        assert tensor.dtype in (torch.float32, torch.float16, torch.bfloat16), tensor.dtype
        out.copy_(tensor)

    def _read(self, name: str, part: Part) -> Tensor:
        """Only what is asked for."""
        if part == ALL:
            return self._home[name].get_tensor(name)  # type: ignore[no-any-return]
        cuts = (part.rows, part.columns)[: len(self.shape(name))]
        index = tuple(slice(None) if cut is None else slice(*cut) for cut in cuts)
        return self._slice(name)[index]  # type: ignore[no-any-return]

    def blocks(self, name: str, part: Part = ALL) -> BlockMatrix:  # noqa: ARG002
        raise AssertionError(f"{name}: safetensors files hold no blocks")

    def close(self) -> None:
        self._home.clear()
        self._stack.close()

    def _open_all(self, folder: Path) -> None:
        index, single = folder / _INDEX, folder / _SINGLE
        if index.is_file():
            weight_map = _read_index(index)
            files = {shard: self._open(folder / shard) for shard in set(weight_map.values())}
            keys = {shard: set(file.keys()) for shard, file in files.items()}
            for name, shard in weight_map.items():
                if name not in keys[shard]:
                    raise ConfigError(
                        f"{folder / shard} has no tensor {name}, though {_INDEX} says so"
                    )
                self._home[name] = files[shard]
        elif single.is_file():
            file = self._open(single)
            self._home = dict.fromkeys(file.keys(), file)
        else:
            raise ConfigError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")

    def _open(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        except FileNotFoundError:
            raise ConfigError(f"{path} is missing, though {_INDEX} names it") from None
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is not a complete safetensors file: {error}") from error

    def _slice(self, name: str) -> Any:
        if name not in self._home:
            raise ConfigError(f"{self._folder} has no tensor {name}")
        return self._home[name].get_slice(name)

    def _bits(self, name: str, dtype: str) -> int:
        if dtype not in _BITS:
            raise ConfigError(f"{self._folder}: {name} is {dtype}; supported: {', '.join(_BITS)}")
        return _BITS[dtype]


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a readable index: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) and Path(shard).name == shard for shard in weight_map.values()
    ):
        raise ConfigError(f"{path}: weight_map must map tensor names to file names")
    return weight_map
