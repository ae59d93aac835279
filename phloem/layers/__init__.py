"""Weights of a decoder layer, and the rotary table."""

from __future__ import annotations

from phloem.layers.rope import RopeTable
from phloem.layers.weights import DecoderWeights, LayerWeights, Linear

__all__ = ["DecoderWeights", "LayerWeights", "Linear", "RopeTable"]
