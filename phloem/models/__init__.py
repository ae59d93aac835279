"""Decoders: one skeleton, a short file per family, and loading from disk."""

from __future__ import annotations

from phloem.models.checkpoint import OnBytes
from phloem.models.decoder import MLP_CHUNK_TOKENS, Decoder
from phloem.models.family import family_of
from phloem.models.forward import Forward
from phloem.models.loading import load_weights
from phloem.models.quantisation import Quantisation, quantisation_of

__all__ = [
    "MLP_CHUNK_TOKENS",
    "Decoder",
    "Forward",
    "OnBytes",
    "Quantisation",
    "family_of",
    "load_weights",
    "quantisation_of",
]
