"""Multi-head latent attention: what its layers keep of a token, and how heads are made of it.

hidden --q_a--> (q_rank) --norm, q_up--> each head's [nope | rope]     q_rank None: one step
       --kv_a-> [latent (kv_rank) | rotary key (rope)]                 what a page keeps, normed
                                                                       and rotated
latent --kv_up--> each head's [key (nope) | value (v)]                 or absorbed: never made
"""

from __future__ import annotations

from dataclasses import dataclass

from phloem.core.errors import ConfigError

__all__ = ["MLAConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Sizes of the parts. A query's head is nope_dim + rope_dim wide, the rotary part last.

    `rope_interleaved`: the checkpoint's rotary rows are pairs of neighbours; loading undoes it.
    `norm_eps`: of the norms of the two latents. Raises ConfigError.
    """

    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int
    norm_eps: float = 1e-6
    rope_interleaved: bool = True

    def __post_init__(self) -> None:
        sizes = {
            "kv_lora_rank": self.kv_rank,
            "q_lora_rank": 1 if self.q_rank is None else self.q_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.v_dim,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"the model's {name} must be at least 1, got {value}")
        if self.rope_dim % 2 or self.kv_rank % 2:
            raise ConfigError(
                "the model's qk_rope_head_dim and kv_lora_rank must be even, "
                f"got {self.rope_dim} and {self.kv_rank}"
            )

    @property
    def row_dim(self) -> int:
        """Numbers that a layer keeps of a token."""
        return self.kv_rank + self.rope_dim

    @property
    def up_dim(self) -> int:
        """Rows of `kv_up` of each head: its key without the rotary part, then its value."""
        return self.nope_dim + self.v_dim
