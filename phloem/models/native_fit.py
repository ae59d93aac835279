"""What the native kernels cannot compute. Imports nothing native, so it can always be asked."""

from __future__ import annotations

from phloem.config.model import ModelConfig
from phloem.kernels.native_abi import PANEL
from phloem.kv.spec import KVDtype

__all__ = ["native_fits", "native_reads"]

MOST_ROW_NUMBERS = 1024  # kMostRowNumbers of csrc/cpu/codec.h


def native_fits(config: ModelConfig) -> str | None:
    """None if native kernels compute this model; else what they lack, for a sentence."""
    if config.intermediate_size % PANEL:
        return (
            f"an intermediate size that {PANEL} divides, and this model's is "
            f"{config.intermediate_size}"
        )
    return None


def native_reads(pages: KVDtype, config: ModelConfig) -> str | None:
    """None if native kernels read such rows of pages; else what they need, for a sentence."""
    width = config.head_dim if config.mla is None else config.mla.row_dim
    if width <= MOST_ROW_NUMBERS or not (pages.is_packed or config.mla):
        return None
    return f"rows of at most {MOST_ROW_NUMBERS} numbers in {pages.value} pages, not of {width}"
