"""GGUF files: header and metadata without torch, and metadata -> ModelConfig.

A light reader of our own: the `gguf` package wraps each of the 100,000 vocabulary strings of a
model in numpy views, which takes seconds; walking them takes a tenth of that.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phloem.config.model import LayerSpec, ModelConfig, RopeConfig, RopeKind
from phloem.core.errors import ConfigError

__all__ = ["GGUFFile", "GGUFTensor", "four_bit_type", "model_config_from_gguf", "read_gguf"]

_MAGIC = 0x46554747
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 1 << 28
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}
_F32_TYPE = 0
_FOUR_BIT_TYPES = {2: "Q4_0", 3: "Q4_1"}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor's blocks lie. `shape` is in row-major order (outermost first)."""

    name: str
    shape: tuple[int, ...]
    type_id: int  # ggml type
    offset: int  # absolute, in bytes


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header. Arrays of numbers are numpy arrays, strings are str."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """Reads values off a buffer; running past its end is a broken file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.pos = 0

    def scalar(self, fmt: str) -> Any:
        (value,) = struct.unpack_from(fmt, self._data, self.pos)
        self.pos += struct.calcsize(fmt)
        return value

    def string(self) -> str:
        size = self.scalar("<Q")
        return self.take(size).decode("utf-8", "replace")

    def take(self, size: int) -> bytes:
        end = self.pos + size
        if end > len(self._data):
            raise struct.error(f"{size} bytes wanted at {self.pos}, the file ends before")
        out = self._data[self.pos : end]
        self.pos = end
        return out

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise struct.error(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> Any:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if count > _MAX_ITEMS:
            raise struct.error(f"an array of {count} items")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.take(count * dtype.itemsize), dtype=dtype)
        return [self.value(kind) for _ in range(count)]


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header. Raises ConfigError for a file that is no GGUF file, or cut short."""
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _parse(path, _Cursor(data))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{path} is not a readable GGUF file: {error}") from error


def _parse(path: Path, cursor: _Cursor) -> GGUFFile:
    if cursor.scalar("<I") != _MAGIC:
        raise ConfigError(f"{path} is not a GGUF file (wrong magic number)")
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise ConfigError(f"{path} has GGUF version {version}; versions 2 and 3 are supported")
    num_tensors, num_values = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    infos = []
    for _ in range(num_tensors):
        name = cursor.string()
        dims = [cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]
        infos.append((name, tuple(reversed(dims)), cursor.scalar("<I"), cursor.scalar("<Q")))
    align = metadata.get("general.alignment", 32)
    base = -(-cursor.pos // align) * align
    tensors = {
        name: GGUFTensor(name, shape, type_id, base + offset)
        for name, shape, type_id, offset in infos
    }
    return GGUFFile(path, metadata, tensors)


def model_config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Translate the metadata. Raises ConfigError for what is absent or unsupported."""
    meta = file.metadata
    family = meta.get("general.architecture")
    if family not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ConfigError(f"{file.path}: unsupported architecture {family!r}; supported: {known}")
    if meta.get(f"{family}.expert_count", 0):
        raise ConfigError(f"{file.path}: mixture-of-experts models are not supported")
    if meta.get(f"{family}.attention.sliding_window", 0):
        raise ConfigError(
            f"{file.path}: sliding window attention is not supported in GGUF files, only in "
            "Hugging Face folders"
        )
    heads = _need(file, f"{family}.attention.head_count")
    hidden = _need(file, f"{family}.embedding_length")
    kv_heads = _need(file, f"{family}.attention.head_count_kv", default=heads)
    head_dim = _need(file, f"{family}.attention.key_length", default=hidden // max(heads, 1))
    if meta.get(f"{family}.rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"{file.path}: RoPE over a part of the head is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{file.path} has no tensor token_embd.weight")
    return ModelConfig(
        architecture=family,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=_need(file, f"{family}.feed_forward_length"),
        layers=(LayerSpec(),) * _need(file, f"{family}.block_count"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=_rope(file, family),
        norm_eps=_need(file, f"{family}.attention.layer_norm_rms_epsilon", kind=float),
        max_position=_need(file, f"{family}.context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        eos_ids=_eos_ids(meta),
        bos_id=meta.get("tokenizer.ggml.bos_token_id"),
        dtype="bf16",
        name=str(meta.get("general.name", file.path.stem)),
        **_FAMILIES[family],
    )


def four_bit_type(file: GGUFFile) -> str | None:
    """The name of the file's 4-bit blocks that kernels read as they are; the commoner of two."""
    found = Counter(t.type_id for t in file.tensors.values() if t.type_id in _FOUR_BIT_TYPES)
    return _FOUR_BIT_TYPES[found.most_common(1)[0][0]] if found else None


def _need(file: GGUFFile, key: str, *, kind: type = int, default: int | None = None) -> Any:
    value = file.metadata.get(key, default)
    if not isinstance(value, kind):
        raise ConfigError(f"{file.path}: metadata {key} must be one {kind.__name__}, got {value!r}")
    return value


def _eos_ids(meta: dict[str, Any]) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (meta.get(f"tokenizer.ggml.{key}") for key in keys)
    return tuple(dict.fromkeys(int(token) for token in ids if token is not None))


def _rope(file: GGUFFile, family: str) -> RopeConfig:
    meta = file.metadata
    theta = float(meta.get(f"{family}.rope.freq_base", 10000.0))
    kind = meta.get(f"{family}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ConfigError(f"{file.path}: RoPE scaling {kind!r} is not supported")
    if "rope_freqs.weight" in file.tensors:
        return RopeConfig(theta=theta, kind=RopeKind.FACTORS, factors=_factors(file))
    if kind == "linear":
        factor = float(meta.get(f"{family}.rope.scaling.factor", 1.0))
        return RopeConfig(theta=theta, kind=RopeKind.LINEAR, factor=factor)
    return RopeConfig(theta=theta)


def _factors(file: GGUFFile) -> tuple[float, ...]:
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.type_id != _F32_TYPE or len(tensor.shape) != 1:
        raise ConfigError(f"{file.path}: rope_freqs.weight must be one row of F32")
    with file.path.open("rb") as stream:
        stream.seek(tensor.offset)
        data = stream.read(4 * tensor.shape[0])
    if len(data) != 4 * tensor.shape[0]:
        raise ConfigError(f"{file.path} is cut short: rope_freqs.weight is incomplete")
    return tuple(float(x) for x in np.frombuffer(data, dtype="<f4"))
