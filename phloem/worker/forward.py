"""Which code computes the forward pass: native kernels, PyTorch's, or the slow reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phloem.attention import (
    AttentionBackend,
    GatherAttention,
    LayeredAttention,
    MLAAttention,
    MLAReferenceAttention,
    ReferenceAttention,
)
from phloem.config.model import ModelConfig
from phloem.core.errors import ConfigError
from phloem.kernels import Ops, Scoring, cpu_kernels, make_ops
from phloem.kernels.native_abi import library
from phloem.layers import DecoderWeights
from phloem.models import Decoder, Forward, OnBytes, Quantisation, load_weights
from phloem.models.native_fit import native_fits
from phloem.models.packing import PackedDecoder
from phloem.models.row import ALONE, Row
from phloem.models.shard import WHOLE, Shard
from phloem.pools import DevicePool

__all__ = ["KERNELS", "ForwardOptions", "ForwardPass", "choose_kernels", "load_forward"]

KERNELS = ("auto", "native", "torch", "reference")


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A model and the attention that belongs to it. `kernels` is what was chosen."""

    kernels: str
    model: Forward
    attention: LayeredAttention
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions:
    """How to compute. `kernels` as `choose_kernels` answered; `threads` None: PyTorch's choice.

    `shard`: the part of the model that this rank computes, and `row` who computes the others.
    """

    kernels: str
    quantisation: Quantisation
    dtype: torch.dtype
    device: torch.device
    threads: int | None
    num_positions: int
    shard: Shard = WHOLE
    row: Row = ALONE


def choose_kernels(
    name: str,
    device: torch.device,
    config: ModelConfig,
    quantisation: Quantisation = Quantisation.NONE,
    *,
    lacking: str | None = None,
) -> str:
    """What "auto" means here. Raises ConfigError for a name or a combination that cannot be.

    On a CPU with bf16 matrix instructions PyTorch, until native ones are measured there; quantised
    weights are what only native kernels read. `lacking`: what native kernels would need beside
    what the model asks of them, and do not have.
    """
    if name not in KERNELS:
        raise ConfigError(f"unknown kernels {name!r}; known: {', '.join(KERNELS)}")
    lacking = native_fits(config) or lacking
    quantised = quantisation is not Quantisation.NONE
    if name == "native" or (name == "auto" and quantised):
        asked = f"--quantization {quantisation.value}" if quantised else "--kernels native"
        instead = "--quantization none" if quantised else "--kernels torch"
        _need_native(asked, device, lacking, instead)
        return "native"
    if name != "auto":
        if quantised:
            raise ConfigError(
                f"--quantization {quantisation.value} needs the native kernels; leave out "
                f"--kernels {name}"
            )
        return name
    return cpu_kernels() if lacking is None and device.type == "cpu" else "torch"


def _need_native(asked: str, device: torch.device, lacking: str | None, instead: str) -> None:
    """Raise ConfigError where native kernels cannot run; `asked` is the flag that wants them."""
    if device.type != "cpu":
        raise ConfigError(f"{asked} runs on a CPU only, not on {device.type}")
    if lacking is not None:
        raise ConfigError(f"{asked} needs {lacking}; use {instead}")
    try:
        library()
    except ConfigError as error:
        raise ConfigError(f"{asked}: {error}") from None


def load_forward(
    path: Path,
    config: ModelConfig,
    pools: Sequence[DevicePool],
    options: ForwardOptions,
    on_progress: OnBytes | None = None,
) -> ForwardPass:
    """Read the checkpoint at `path`, of the model `config`, and join it with pools, one per
    component.

    Raises ConfigError.
    """
    if options.kernels == "native":
        return _native(path, config, pools, options, on_progress)
    weights = load_weights(
        path,
        config,
        dtype=options.dtype,
        device=options.device,
        shard=options.shard,
        on_progress=on_progress,
    )
    ops, own = make_ops(options.kernels), options.shard.config(config)
    backends = _backends(own, pools, weights, ops, own_heads=options.shard.count > 1)
    attention = LayeredAttention(backends, own.component_layers)
    model = Decoder(own, weights, ops=ops, num_positions=options.num_positions, row=options.row)
    return ForwardPass(options.kernels, model, attention, weights.num_bytes)


def _backends(
    config: ModelConfig,
    pools: Sequence[DevicePool],
    weights: DecoderWeights,
    ops: Ops,
    *,
    own_heads: bool,
) -> list[AttentionBackend[Any]]:
    """Attention over each component's pages, in PyTorch; slow and obvious if `ops` are.

    `own_heads`: other ranks compute other heads.
    """
    slow = ops.name == "reference"
    scoring = Scoring(config.score_scale, config.attn_softcap)
    if config.mla is not None:
        (pool,) = pools
        up = [layer.kv_up.weight for layer in weights.layers if layer.kv_up is not None]
        assert len(up) == config.num_layers, "every layer makes K and V of its latents"
        latent: dict[str, Any] = {"mla": config.mla, "up": up, "scoring": scoring}
        if slow:
            return [MLAReferenceAttention(pool.buffer, **latent, own_heads=own_heads)]
        return [MLAAttention(pool.buffer, ops, **latent, own_heads=own_heads)]
    return [
        ReferenceAttention(pool.buffer, scoring=scoring, window=window)
        if slow
        else GatherAttention(pool.buffer, ops, scoring=scoring, window=window)
        for pool, window in zip(pools, (None, config.window), strict=False)
    ]


def _native(
    path: Path,
    config: ModelConfig,
    pools: Sequence[DevicePool],
    options: ForwardOptions,
    on_progress: OnBytes | None,
) -> ForwardPass:
    # Imported here: a library that is loaded only where it is used.
    from phloem.attention.native import NativeAttention
    from phloem.kernels.native import NativeKernels
    from phloem.models.native_decoder import NativeDecoder
    from phloem.models.packing import load_packed

    weights = load_packed(
        path,
        config,
        dtype=options.dtype,
        quantisation=options.quantisation,
        shard=options.shard,
        on_progress=on_progress,
    )
    config = options.shard.config(config)
    if config.mla is not None:
        return _native_latent(config, pools, options, weights)
    kernels = NativeKernels(threads=options.threads)
    model = NativeDecoder(
        config,
        weights,
        kernels=kernels,
        buffers=[pool.buffer for pool in pools],
        num_positions=options.num_positions,
        row=options.row,
    )
    scoring = Scoring(config.score_scale, config.attn_softcap)
    backends = [
        NativeAttention(pool.buffer, kernels, scoring=scoring, window=window)
        for pool, window in zip(pools, (None, config.window), strict=False)
    ]
    attention = LayeredAttention(backends, config.component_layers)
    return ForwardPass("native", model, attention, model.weight_bytes)


def _native_latent(
    config: ModelConfig,
    pools: Sequence[DevicePool],
    options: ForwardOptions,
    weights: PackedDecoder,
) -> ForwardPass:
    from phloem.attention.native_mla import NativeLatentAttention
    from phloem.kernels.native_latent import NativeLatentKernels
    from phloem.models.native_latent import NativeLatentDecoder

    assert config.mla is not None, "a model of latents"
    (pool,) = pools
    kernels = NativeLatentKernels(threads=options.threads)
    model = NativeLatentDecoder(
        config,
        weights,
        kernels=kernels,
        buffer=pool.buffer,
        num_positions=options.num_positions,
        row=options.row,
    )
    up = [layer.kv_up for layer in weights.layers if layer.kv_up is not None]
    assert len(up) == config.num_layers, "every layer makes K and V of its latents"
    scoring = Scoring(config.score_scale, config.attn_softcap)
    backend = NativeLatentAttention(
        pool.buffer,
        kernels,
        mla=config.mla,
        up=up,
        scoring=scoring,
        own_heads=options.shard.count > 1,
    )
    attention = LayeredAttention([backend], config.component_layers)
    return ForwardPass("native", model, attention, model.weight_bytes)
