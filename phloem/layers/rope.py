"""Rotary position embedding: frequencies by kind, and a table of angles per position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phloem.config.model import RopeConfig, RopeKind

__all__ = ["RopeTable", "inverse_frequencies"]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, (head_dim / 2,) fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    freqs = 1.0 / (rope.theta**exponents)
    if rope.kind is RopeKind.LINEAR:
        return freqs / rope.factor
    if rope.kind is RopeKind.FACTORS:
        return freqs / torch.tensor(rope.factors, dtype=torch.float32)
    if rope.kind is RopeKind.LLAMA3:
        return _llama3(freqs, rope)
    if rope.kind is RopeKind.YARN:
        return _yarn(freqs, rope, head_dim)
    return freqs


def _yarn(freqs: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Pairs that turn often within the original length are kept, those that hardly turn are
    stretched by `factor`; between them a ramp over the pairs' numbers."""

    def pair_of(turns: float) -> float:
        """The (fractional) pair that turns so often within the original length."""
        wavelength = rope.original_max_position / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # then it is a step
    ramp = ((torch.arange(head_dim // 2) - low) / width).clamp(0.0, 1.0)
    return freqs * (1.0 - ramp) + freqs / rope.factor * ramp


def _llama3(freqs: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / freqs
    turns = rope.original_max_position / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return freqs * (blend + (1.0 - blend) / rope.factor)


class RopeTable:
    """cos and sin of every position below `num_positions`, fp32 (num_positions, head_dim / 2),
    both times the kind's scale."""

    def __init__(
        self, rope: RopeConfig, *, head_dim: int, num_positions: int, device: torch.device
    ) -> None:
        positions = torch.arange(num_positions, dtype=torch.int64).float()
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
        self.cos = (angles.cos() * rope.scale).to(device)
        self.sin = (angles.sin() * rope.scale).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at absolute positions (N,): two (N, head_dim / 2)."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)
