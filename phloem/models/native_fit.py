"""What the native kernels cannot compute. Imports nothing native, so it can always be asked."""

from __future__ import annotations

from phloem.config.model import ModelConfig
from phloem.kernels.native_abi import PANEL
from phloem.kv.spec import KVDtype

__all__ = ["native_fits", "native_reads"]


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


def native_reads(pages: KVDtype, model: KVDtype) -> str | None:
    """None if native kernels read pages of that dtype; else what they need, for a sentence."""
    if pages is model:
        return None
    return f"KV pages in the model's dtype ({model.value}), and --kv-dtype is {pages.value}"
