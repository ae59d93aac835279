"""What a checkpoint says about its model, typed: the same nouns for Hugging Face and GGUF files."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from phloem.core.errors import ConfigError

__all__ = ["LayerSpec", "ModelConfig", "RopeConfig", "RopeKind"]


class RopeKind(enum.Enum):
    """How rotary frequencies are stretched beyond the length they were trained for."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    FACTORS = "factors"  # one divisor per frequency, as GGUF stores it


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding over the whole head dimension, halves rotated together."""

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.theta > 0 or not self.factor > 0:
            raise ConfigError(
                f"RoPE theta and factor must be positive, got {self.theta} and {self.factor}"
            )
        if self.kind is RopeKind.LLAMA3 and not (
            self.original_max_position > 0 and self.high_freq_factor > self.low_freq_factor > 0
        ):
            raise ConfigError(
                "llama3 RoPE needs original_max_position_embeddings > 0 and "
                "high_freq_factor > low_freq_factor > 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one decoder layer does. `window` None: it attends to all earlier tokens."""

    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder: sizes, switches and special ids. Raises ConfigError if they contradict."""

    architecture: str  # names the family file: phloem/models/<architecture>.py
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    norm_eps: float
    max_position: int
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "bf16"  # what the checkpoint was stored or trained in: "fp32" or "bf16"
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"the model's {name} must be at least 1, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_kv_heads} KV heads do not divide {self.num_heads} heads")
        if self.head_dim % 2:
            raise ConfigError(f"the model's head_dim must be even, got {self.head_dim}")
        if not 0.0 < self.norm_eps < 1.0:
            raise ConfigError(f"the model's norm_eps must be between 0 and 1, got {self.norm_eps}")
        if self.rope.kind is RopeKind.FACTORS and len(self.rope.factors) * 2 != self.head_dim:
            raise ConfigError(
                f"{len(self.rope.factors)} RoPE factors do not fit head_dim {self.head_dim}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights in memory; a tied output head is the embedding and counts once."""
        hidden, inter = self.hidden_size, self.intermediate_size
        qkv = self.q_size + 2 * self.kv_size
        per_layer = hidden * qkv + self.q_size * hidden + 3 * hidden * inter + 2 * hidden
        per_layer += qkv if self.qkv_bias else 0
        per_layer += hidden if self.out_bias else 0
        per_layer += 2 * self.head_dim if self.qk_norm else 0
        tables = self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
        return self.num_layers * per_layer + tables + hidden
