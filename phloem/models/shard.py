"""A model divided among the ranks of a row: which heads, and how much of MLP and vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phloem.config.model import ModelConfig
from phloem.core.errors import ConfigError
from phloem.kernels.native_abi import PANEL
from phloem.kv.layout import default_head_groups

__all__ = ["WHOLE", "Shard", "check_tp"]


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count` equal ones; what it divides, `check_tp` has let pass."""

    index: int = 0
    count: int = 1

    def span(self, size: int) -> tuple[int, int]:
        """First and last + 1 of this part of `size` things."""
        assert size % self.count == 0, f"{self.count} parts of {size}"
        each = size // self.count
        return self.index * each, (self.index + 1) * each

    def config(self, config: ModelConfig) -> ModelConfig:
        """The model as this part computes it: fewer heads, a narrower MLP."""
        latent = config.mla is not None
        return replace(
            config,
            num_heads=config.num_heads // self.count,
            num_kv_heads=1 if latent else config.num_kv_heads // self.count,
            intermediate_size=config.intermediate_size // self.count,
        )

    def divides_head(self, config: ModelConfig) -> bool:
        """Whether each part computes the logits of its part of the vocabulary, or all of them.

        A part is whole panels, so that it may be a view of a packed embedding.
        """
        return self.count > 1 and config.vocab_size % (self.count * PANEL) == 0


WHOLE = Shard()


def check_tp(config: ModelConfig, tp: int) -> None:
    """Raise ConfigError if the model cannot be divided among `tp` ranks.

    Every rank has whole KV heads and whole head groups, which are what pages are stored by.
    """
    if tp == 1:
        return
    sizes = {"query heads": config.num_heads, "intermediate size": config.intermediate_size}
    if config.mla is None:
        groups = default_head_groups(config.num_kv_heads)
        sizes = {"KV heads": config.num_kv_heads, "head groups": groups, **sizes}
    for name, size in sizes.items():
        if size % tp:
            fits = [n for n in range(2, 65) if all(s % n == 0 for s in sizes.values())]
            instead = f"--tp {' or '.join(map(str, fits))}" if fits else "--cp"
            raise ConfigError(f"--tp {tp} does not divide the model's {size} {name}; use {instead}")
