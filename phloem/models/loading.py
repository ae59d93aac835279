"""Checkpoint -> DecoderWeights: names, shapes, merging, one tensor in flight at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phloem.config.checkpoint import CheckpointKind, checkpoint_kind
from phloem.config.model import ModelConfig
from phloem.core.errors import ConfigError
from phloem.layers import DecoderWeights, LayerWeights, Linear
from phloem.models.family import family_of
from phloem.models.gguf_source import GGUFSource
from phloem.models.safetensors_source import SafetensorsSource
from phloem.models.source import WeightSource

__all__ = ["OnBytes", "load_weights"]

OnBytes = Callable[[int, int], None]


def load_weights(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnBytes | None = None,
) -> DecoderWeights:
    """Read all weights of the checkpoint at `path` into `dtype` on `device`.

    `on_progress(done, total)` counts bytes of the file. Raises ConfigError for a checkpoint that
    lacks a tensor, has one of a wrong shape, or is cut short.
    """
    kind = checkpoint_kind(path)
    source: WeightSource
    source = SafetensorsSource(path) if kind is CheckpointKind.HF else GGUFSource(path)
    try:
        target = _Target(dtype, device)
        return _Loader(source, path, config, kind, target=target, on_progress=on_progress).load()
    finally:
        source.close()


@dataclass(frozen=True, slots=True)
class _Target:
    dtype: torch.dtype
    device: torch.device


class _Loader:
    """Builds the structs of one checkpoint."""

    def __init__(
        self,
        source: WeightSource,
        path: Path,
        config: ModelConfig,
        kind: CheckpointKind,
        *,
        target: _Target,
        on_progress: OnBytes | None,
    ) -> None:
        family = family_of(config.architecture)
        self._source, self._path, self._config = source, path, config
        self._names = family.hf if kind is CheckpointKind.HF else family.gguf
        self._norm_offset = family.hf_norm_offset if kind is CheckpointKind.HF else 0.0
        self._interleaved = kind is CheckpointKind.GGUF and family.gguf_interleaves_qk
        self._dtype, self._device = target.dtype, target.device
        self._on_progress = on_progress
        self._done, self._total = 0, sum(source.num_bytes(name) for name in self._wanted())
        self._advance(0)

    def load(self) -> DecoderWeights:
        config, names = self._config, self._names
        embedding = self._stack([names.embedding], (config.vocab_size, config.hidden_size))
        layers = tuple(self._layer(i) for i in range(config.num_layers))
        head = embedding
        if not config.tie_embeddings:
            head = self._stack([names.head], (config.vocab_size, config.hidden_size))
        return DecoderWeights(
            embedding=embedding,
            layers=layers,
            norm=self._norm(names.norm, config.hidden_size),
            head=head,
        )

    def _layer(self, i: int) -> LayerWeights:
        c, n = self._config, self._names
        q, k, v = (name.format(i=i) for name in (n.q, n.k, n.v))
        gate, up = n.gate.format(i=i), n.up.format(i=i)
        hidden, inter = c.hidden_size, c.intermediate_size
        qk = (c.num_heads, c.num_kv_heads) if self._interleaved else ()
        sizes = (c.q_size, c.kv_size, c.kv_size)
        bias = None
        if c.qkv_bias:
            parts = [self._part(f"{m}.bias", (s,)) for m, s in zip((q, k, v), sizes, strict=True)]
            bias = self._merge(parts, qk)
        weights = [
            self._part(f"{m}.weight", (s, hidden)) for m, s in zip((q, k, v), sizes, strict=True)
        ]
        return LayerWeights(
            attn_norm=self._norm(n.attn_norm.format(i=i), hidden),
            qkv=Linear(self._merge(weights, qk), bias),
            q_norm=self._norm(n.q_norm.format(i=i), c.head_dim) if c.qk_norm else None,
            k_norm=self._norm(n.k_norm.format(i=i), c.head_dim) if c.qk_norm else None,
            out=Linear(
                self._stack([n.out.format(i=i)], (hidden, c.q_size)),
                self._read_bias(n.out.format(i=i), hidden) if c.out_bias else None,
            ),
            mlp_norm=self._norm(n.mlp_norm.format(i=i), hidden),
            gate_up=Linear(self._stack([gate, up], (inter, hidden))),
            down=Linear(self._stack([n.down.format(i=i)], (hidden, inter))),
            post_attn_norm=self._norm(n.post_attn_norm.format(i=i), hidden)
            if c.post_norms
            else None,
            post_mlp_norm=self._norm(n.post_mlp_norm.format(i=i), hidden) if c.post_norms else None,
            sinks=self._own(self._part(n.sinks.format(i=i), (c.num_heads,))) if c.sinks else None,
        )

    def _wanted(self) -> list[str]:
        """Every tensor that `load` will read; a missing one is found out here, before any copy."""
        c, n = self._config, self._names
        modules = [n.embedding, n.norm] + ([] if c.tie_embeddings else [n.head])
        per_layer = [n.attn_norm, n.q, n.k, n.v, n.out, n.mlp_norm, n.gate, n.up, n.down]
        per_layer += [n.q_norm, n.k_norm] if c.qk_norm else []
        per_layer += [n.post_attn_norm, n.post_mlp_norm] if c.post_norms else []
        biased = [n.q, n.k, n.v] if c.qkv_bias else []
        biased += [n.out] if c.out_bias else []
        wanted = [f"{module}.weight" for module in modules]
        for i in range(c.num_layers):
            wanted += [f"{module.format(i=i)}.weight" for module in per_layer]
            wanted += [f"{module.format(i=i)}.bias" for module in biased]
            wanted += [n.sinks.format(i=i)] if c.sinks else []
        return wanted

    def _part(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self._source.shape(name)
        if found != shape:
            raise ConfigError(f"{self._path}: {name} has shape {found}, the config wants {shape}")
        tensor = self._source.read(name)
        self._advance(self._source.num_bytes(name))
        return tensor

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)

    def _norm(self, module: str, size: int) -> Tensor:
        weight = self._part(f"{module}.weight", (size,))
        if self._norm_offset == 0.0:
            return self._own(weight)
        return (weight.float() + self._norm_offset).to(self._device)

    def _read_bias(self, module: str, size: int) -> Tensor:
        return self._own(self._part(f"{module}.bias", (size,)))

    def _stack(self, modules: Sequence[str], shape: tuple[int, int]) -> Tensor:
        """One contiguous matrix from modules of equal shape, rows one below the other."""
        out = torch.empty(
            (len(modules) * shape[0], shape[1]), dtype=self._dtype, device=self._device
        )
        for i, module in enumerate(modules):
            out[i * shape[0] : (i + 1) * shape[0]] = self._part(f"{module}.weight", shape)
        return out

    def _merge(self, parts: Sequence[Tensor], interleaved_heads: tuple[int, ...]) -> Tensor:
        """q, k and v one below the other; the first ones may have interleaved rows."""
        plain = [
            _split_halves(part, interleaved_heads[i]) if i < len(interleaved_heads) else part
            for i, part in enumerate(parts)
        ]
        return torch.cat([p.to(dtype=self._dtype) for p in plain]).to(self._device)

    def _own(self, tensor: Tensor) -> Tensor:
        """A copy that does not keep the file mapped."""
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)


def _split_halves(rows: Tensor, heads: int) -> Tensor:
    """Undo GGUF's interleaving: (heads, D / 2, 2, ...) back to (heads, 2, D / 2, ...)."""
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
