"""Which code computes the forward pass: native kernels, PyTorch's, or the slow reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phloem.attention import GatherAttention, LayeredAttention, ReferenceAttention
from phloem.config.model import ModelConfig
from phloem.core.errors import ConfigError
from phloem.kernels import Scoring, cpu_multiplies_bf16, make_ops
from phloem.layers import DecoderWeights
from phloem.models import Decoder, Forward
from phloem.models.native_fit import native_fits
from phloem.pools import DevicePool

__all__ = ["KERNELS", "ForwardPass", "choose_kernels", "make_forward"]

KERNELS = ("auto", "native", "torch", "reference")


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A model and the attention that belongs to it. `kernels` is what was chosen."""

    kernels: str
    model: Forward
    attention: LayeredAttention
    weight_bytes: int


def choose_kernels(name: str, device: torch.device, config: ModelConfig) -> str:
    """What "auto" means here. Raises ConfigError for a name or a combination that cannot be.

    On a CPU with bf16 matrix instructions PyTorch's products are still the faster ones.
    """
    if name not in KERNELS:
        raise ConfigError(f"unknown kernels {name!r}; known: {', '.join(KERNELS)}")
    if name == "native" and device.type != "cpu":
        raise ConfigError(f"--kernels native runs on a CPU only, not on {device.type}")
    lacking = native_fits(config)
    if name == "native" and lacking is not None:
        raise ConfigError(f"--kernels native needs {lacking}; use --kernels torch")
    if name != "auto":
        return name
    from phloem.kernels.native_abi import native_available

    wanted = lacking is None and device.type == "cpu" and not cpu_multiplies_bf16()
    return "native" if wanted and native_available() else "torch"


def make_forward(
    kernels: str,
    config: ModelConfig,
    weights: DecoderWeights,
    pools: Sequence[DevicePool],
    *,
    num_positions: int,
    threads: int | None,
) -> ForwardPass:
    """Join weights and pools, one per component; `kernels` as `choose_kernels` answered.

    Native kernels pack the weights: nothing keeps those of `weights` alive but its owner.
    """
    if kernels == "native":
        return _native(config, weights, pools, num_positions=num_positions, threads=threads)
    ops = make_ops(kernels)
    slow = kernels == "reference"
    scoring = Scoring(config.score_scale, config.attn_softcap)
    backends = [
        ReferenceAttention(pool.buffer, scoring=scoring, window=window)
        if slow
        else GatherAttention(pool.buffer, ops, scoring=scoring, window=window)
        for pool, window in zip(pools, (None, config.window), strict=False)
    ]
    attention = LayeredAttention(backends, config.component_layers)
    model = Decoder(config, weights, ops=ops, num_positions=num_positions)
    return ForwardPass(kernels, model, attention, weights.num_bytes)


def _native(
    config: ModelConfig,
    weights: DecoderWeights,
    pools: Sequence[DevicePool],
    *,
    num_positions: int,
    threads: int | None,
) -> ForwardPass:
    # Imported here: a library that is loaded only where it is used.
    from phloem.attention.native import NativeAttention
    from phloem.kernels.native import NativeKernels
    from phloem.models.native_decoder import NativeDecoder

    library = NativeKernels(threads=threads)
    model = NativeDecoder(
        config, weights, kernels=library, buffer=pools[0].buffer, num_positions=num_positions
    )
    backends = [NativeAttention(pool.buffer, library) for pool in pools]
    attention = LayeredAttention(backends, config.component_layers)
    return ForwardPass("native", model, attention, model.weight_bytes)
