"""What weight matrices are held in while a model runs."""

from __future__ import annotations

import enum

from phloem.core.errors import ConfigError

__all__ = ["Quantisation", "quantisation_of"]


class Quantisation(enum.Enum):
    """`none`: the model's dtype. `int8`: 8 bits with scales. `q4`: a GGUF file's own blocks."""

    NONE = "none"
    INT8 = "int8"
    Q4 = "q4"


def quantisation_of(name: str) -> Quantisation:
    """Raises ConfigError for a name that is none of them."""
    try:
        return Quantisation(name)
    except ValueError:
        known = ", ".join(q.value for q in Quantisation)
        raise ConfigError(f"unknown quantization {name!r}; supported: {known}") from None
