"""What the native kernels cannot compute yet. Imports nothing native, so it can always be asked."""

from __future__ import annotations

from phloem.config.model import Activation, ModelConfig
from phloem.kernels.native_abi import PANEL

__all__ = ["native_fits"]


def native_fits(config: ModelConfig) -> str | None:
    """None if `NativeDecoder` computes this model; else what it lacks, for a sentence."""
    if config.intermediate_size % PANEL:
        return (
            f"an intermediate size that {PANEL} divides, and this model's is "
            f"{config.intermediate_size}"
        )
    lacking = {
        "no sliding windows": config.window is not None,
        "no attention sinks": config.sinks,
        "no soft-capped scores": config.attn_softcap is not None,
        "no norms behind attention and MLP": config.post_norms,
        "SiLU as activation": config.activation is not Activation.SILU,
        "no scaled embeddings": config.embedding_scale != 1.0,
        "no soft-capped logits": config.final_softcap is not None,
    }
    return next((what for what, present in lacking.items() if present), None)
