"""Counter-based randomness: draw number `counter` of a seed, with no state in between.

A row's draws depend on its seed and output index alone: not on its batch-mates, on chunking or on
a retraction.
"""

from __future__ import annotations

__all__ = ["uniform"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _splitmix64(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, counter: int) -> float:
    """A number in [0, 1) with 53 random bits. Any integers will do."""
    bits = _splitmix64(_splitmix64(seed & _MASK) ^ (counter & _MASK))
    return (bits >> 11) * 2.0**-53
