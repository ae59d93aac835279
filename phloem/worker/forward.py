"""Which code computes the forward pass: native kernels, PyTorch's, or the slow reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phloem.attention import AttentionBackend, GatherAttention, ReferenceAttention
from phloem.config.model import ModelConfig
from phloem.core.errors import ConfigError
from phloem.kernels import cpu_multiplies_bf16, make_ops
from phloem.kernels.native_abi import PANEL, library, native_available
from phloem.models import Decoder, Forward, OnBytes, Quantisation, load_weights
from phloem.pools import DevicePool

__all__ = ["KERNELS", "ForwardOptions", "ForwardPass", "choose_kernels", "load_forward"]

KERNELS = ("auto", "native", "torch", "reference")


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A model and the attention that belongs to it. `kernels` is what was chosen."""

    kernels: str
    model: Forward
    attention: AttentionBackend[Any]
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions:
    """How to compute. `kernels` as `choose_kernels` answered; `threads` None: PyTorch's choice."""

    kernels: str
    quantisation: Quantisation
    dtype: torch.dtype
    device: torch.device
    threads: int | None
    num_positions: int


def choose_kernels(
    name: str,
    device: torch.device,
    config: ModelConfig,
    quantisation: Quantisation = Quantisation.NONE,
) -> str:
    """What "auto" means here. Raises ConfigError for a name or a combination that cannot be.

    On a CPU with bf16 matrix instructions PyTorch's products are still the faster ones; quantised
    weights are what only native kernels read.
    """
    if name not in KERNELS:
        raise ConfigError(f"unknown kernels {name!r}; known: {', '.join(KERNELS)}")
    fits = config.intermediate_size % PANEL == 0
    quantised = quantisation is not Quantisation.NONE
    if name == "native" or (name == "auto" and quantised):
        asked = f"--quantization {quantisation.value}" if quantised else "--kernels native"
        _need_native(asked, device, config, fits=fits, quantised=quantised)
        return "native"
    if name != "auto":
        if quantised:
            raise ConfigError(
                f"--quantization {quantisation.value} needs the native kernels; leave out "
                f"--kernels {name}"
            )
        return name
    wanted = fits and device.type == "cpu" and not cpu_multiplies_bf16()
    return "native" if wanted and native_available() else "torch"


def _need_native(
    asked: str, device: torch.device, config: ModelConfig, *, fits: bool, quantised: bool
) -> None:
    """Raise ConfigError where native kernels cannot run; `asked` is the flag that wants them."""
    if device.type != "cpu":
        raise ConfigError(f"{asked} runs on a CPU only, not on {device.type}")
    if not fits:
        instead = "--quantization none" if quantised else "--kernels torch"
        raise ConfigError(
            f"{asked} needs an intermediate size that {PANEL} divides, and this model's "
            f"is {config.intermediate_size}; use {instead}"
        )
    try:
        library()
    except ConfigError as error:
        raise ConfigError(f"{asked}: {error}") from None


def load_forward(
    path: Path,
    config: ModelConfig,
    pool: DevicePool,
    options: ForwardOptions,
    on_progress: OnBytes | None = None,
) -> ForwardPass:
    """Read the checkpoint at `path` and join it with the pool. Raises ConfigError."""
    if options.kernels == "native":
        return _native(path, config, pool, options, on_progress)
    weights = load_weights(
        path, config, dtype=options.dtype, device=options.device, on_progress=on_progress
    )
    ops = make_ops(options.kernels)
    slow = options.kernels == "reference"
    attention = ReferenceAttention(pool.buffer) if slow else GatherAttention(pool.buffer, ops)
    model = Decoder(config, weights, ops=ops, num_positions=options.num_positions)
    return ForwardPass(options.kernels, model, attention, weights.num_bytes)


def _native(
    path: Path,
    config: ModelConfig,
    pool: DevicePool,
    options: ForwardOptions,
    on_progress: OnBytes | None,
) -> ForwardPass:
    # Imported here: a library that is loaded only where it is used.
    from phloem.attention.native import NativeAttention
    from phloem.kernels.native import NativeKernels
    from phloem.models.native_decoder import NativeDecoder
    from phloem.models.packing import load_packed

    kernels = NativeKernels(threads=options.threads)
    weights = load_packed(
        path,
        config,
        dtype=options.dtype,
        quantisation=options.quantisation,
        on_progress=on_progress,
    )
    model = NativeDecoder(
        config, weights, kernels=kernels, buffer=pool.buffer, num_positions=options.num_positions
    )
    return ForwardPass("native", model, NativeAttention(pool.buffer, kernels), model.weight_bytes)
