"""What the native kernels cannot compute. Imports nothing native, so it can always be asked."""

from __future__ import annotations

from phloem.config.model import ModelConfig
from phloem.kernels.native_abi import PANEL

__all__ = ["native_fits"]


def native_fits(config: ModelConfig) -> str | None:
    """None if `NativeDecoder` computes this model; else what it lacks, for a sentence."""
    if config.mla is not None:
        return "K and V of every head in the pages, and this model keeps a latent (MLA)"
    if config.intermediate_size % PANEL:
        return (
            f"an intermediate size that {PANEL} divides, and this model's is "
            f"{config.intermediate_size}"
        )
    return None
