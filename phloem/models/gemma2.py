"""Gemma 2: norms on both sides of attention and MLP, their weights stored less one."""

from __future__ import annotations

from dataclasses import replace

from phloem.models.family import HF_NAMES, Family

__all__ = ["FAMILY", "GEMMA_NAMES"]

GEMMA_NAMES = replace(HF_NAMES, mlp_norm="model.layers.{i}.pre_feedforward_layernorm")
FAMILY = Family(architecture="gemma2", hf=GEMMA_NAMES, hf_norm_offset=1.0)
