"""What a checkpoint says about its model, typed: the same nouns for Hugging Face and GGUF files."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from phloem.config.mla import MLAConfig
from phloem.core.errors import ConfigError

__all__ = ["Activation", "LayerSpec", "ModelConfig", "RopeConfig", "RopeKind"]


class Activation(enum.Enum):
    """What the MLP does to its gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"  # GELU by its tanh approximation


class RopeKind(enum.Enum):
    """How rotary frequencies are stretched beyond the length they were trained for."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    FACTORS = "factors"  # one divisor per frequency, as GGUF stores it
    YARN = "yarn"  # slow frequencies stretched, fast ones kept, a ramp between them


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding over the whole head dimension, halves rotated together.

    YaRN: `beta_fast` and `beta_slow` are turns within the original length, between which the ramp
    lies (on whole dimensions, if `truncate`); `scale` multiplies cos and sin.
    """

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    scale: float = 1.0

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
        if self.kind is RopeKind.YARN and not (
            self.original_max_position > 0
            and self.beta_fast > self.beta_slow > 0
            and self.scale > 0
            and self.theta > 1
        ):
            raise ConfigError(
                "yarn RoPE needs original_max_position_embeddings > 0, rope_theta > 1, "
                "attention_factor > 0 and beta_fast > beta_slow > 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one decoder layer does.

    `window`: of how many last tokens, itself included, a token sees the state; None: of all.
    """

    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder: sizes, switches and special ids. Raises ConfigError if they contradict.

    `window_rope` None: layers with a window rotate as the others do. `query_scale` None: scores
    are divided by the root of head_dim. A softcap c turns a score s into c * tanh(s / c). `sinks`:
    each head has one learned score more in its softmax, of no token. `post_norms`: what attention
    and MLP give is normalised before it is added to the residual. `mla`: all heads share one latent
    (num_kv_heads 1); head_dim is then that of a query.
    """

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
    activation: Activation = Activation.SILU
    window_rope: RopeConfig | None = None
    query_scale: float | None = None
    attn_softcap: float | None = None
    final_softcap: float | None = None
    sinks: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    mla: MLAConfig | None = None
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
        for rope in (self.rope, self.window_rope or self.rope):
            if rope.kind is RopeKind.FACTORS and len(rope.factors) * 2 != self.rope_dim:
                raise ConfigError(
                    f"{len(rope.factors)} RoPE factors do not fit head_dim {self.rope_dim}"
                )
        for name in ("query_scale", "attn_softcap", "final_softcap", "embedding_scale"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"the model's {name} must be positive, got {value}")
        self._check_windows()
        self._check_latent()

    def _check_latent(self) -> None:
        if self.mla is None:
            return
        assert self.num_kv_heads == 1, "a latent is of no head"
        assert self.head_dim == self.mla.nope_dim + self.mla.rope_dim, "a query's head"
        if self.window is not None or self.sinks or self.attn_softcap or self.qk_norm:
            raise ConfigError("latent attention has no windows, sinks, softcaps or norms of heads")

    def _check_windows(self) -> None:
        windows = sorted({layer.window for layer in self.layers if layer.window is not None})
        if windows and windows[0] < 1:
            raise ConfigError(f"a sliding window must be at least 1 token, got {windows[0]}")
        if len(windows) > 1:
            raise ConfigError(
                f"layers have windows of {' and '.join(map(str, windows))} tokens; "
                "one size per model is supported"
            )

    @property
    def window(self) -> int | None:
        """The window of those layers that have one; None if none has."""
        return next((layer.window for layer in self.layers if layer.window is not None), None)

    @property
    def component_layers(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the layers of each component of the state: full, and window if there is one.

        A model all of whose layers have a window has a full component without layers.
        """
        full = tuple(i for i, layer in enumerate(self.layers) if layer.window is None)
        if self.window is None:
            return (full,)
        return full, tuple(i for i, layer in enumerate(self.layers) if layer.window is not None)

    @property
    def score_scale(self) -> float:
        """The factor of the product of a query and a key."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def rope_dim(self) -> int:
        """How many numbers of a head are rotated: all, but for latent attention."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def out_size(self) -> int:
        """What attention gives for a token, all heads side by side."""
        return self.q_size if self.mla is None else self.num_heads * self.mla.v_dim

    @property
    def num_parameters(self) -> int:
        """Weights in memory; a tied output head is the embedding and counts once."""
        hidden, inter = self.hidden_size, self.intermediate_size
        qkv = self.q_size + 2 * self.kv_size
        per_layer = hidden * qkv if self.mla is None else self._latent_parameters(self.mla)
        per_layer += self.out_size * hidden + 3 * hidden * inter + 2 * hidden
        per_layer += qkv if self.qkv_bias else 0
        per_layer += hidden if self.out_bias else 0
        per_layer += 2 * self.head_dim if self.qk_norm else 0
        per_layer += self.num_heads if self.sinks else 0
        per_layer += 2 * hidden if self.post_norms else 0
        tables = self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
        return self.num_layers * per_layer + tables + hidden

    def _latent_parameters(self, mla: MLAConfig) -> int:
        """Of the projections before attention, and of the norms of the latents."""
        down = self.hidden_size * mla.row_dim + mla.kv_rank
        up = mla.kv_rank * self.num_heads * mla.up_dim
        if mla.q_rank is None:
            return down + up + self.hidden_size * self.q_size
        return down + up + mla.q_rank * (self.hidden_size + self.q_size + 1)
