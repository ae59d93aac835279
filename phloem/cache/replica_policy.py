"""Which pages are worth a replica: the leader's business alone.

A page is hot if ranks that do not own it have read it often of late. A read is one row in one step;
all counts are halved now and then, so what was read long ago does not count for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phloem.core.errors import ConfigError

__all__ = ["HotPages", "ReplicaConfig"]

_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """How far replicas may go. Raises ConfigError for values that cannot be."""

    fraction: float = 0.125  # of a pool's pages, at most
    reserve: float = 0.0625  # of a pool's pages, which stay free beside them
    reads: int = 2  # from which on a page is hot
    half_life_steps: int = 256
    pages_per_step: int = 16  # that one rank copies

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"replicas may take 0 to 1 of a pool, got {self.fraction}")
        if not 0 <= self.reserve < 1:
            raise ConfigError(f"0 to 1 of a pool may be kept free, got {self.reserve}")
        for name in ("reads", "half_life_steps", "pages_per_step"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


class HotPages:
    """Counts reads, whoever does them: a page that is hot is copied to those that read it then.

    Pages are numbered through the pools of all owners.
    """

    def __init__(self, num_pages: int, config: ReplicaConfig) -> None:
        self._heat = np.zeros(num_pages, dtype=np.float32)
        self._reads, self._half_life = config.reads, config.half_life_steps
        self._steps = 0

    def read(self, pages: _Ints, times: int) -> _Bools:
        """Ranks that do not own them read these pages, each one `times`; which are hot now."""
        heat = self._heat[pages] + np.float32(times)
        self._heat[pages] = heat
        hot: _Bools = heat >= self._reads
        return hot

    def is_hot(self, page: int) -> bool:
        """Whether it is still worth a replica."""
        return bool(self._heat[page] >= self._reads)

    def forget(self, pages: _Ints) -> None:
        """These hold something else from now on."""
        self._heat[pages] = 0

    def step(self) -> bool:
        """A step has been planned; True if some pages may have become cold by that."""
        self._steps += 1
        if self._steps % self._half_life:
            return False
        self._heat *= np.float32(0.5)
        return True

    def cold(self, pages: _Ints) -> _Bools:
        """Which are not worth their replicas any more: half a read is left of all."""
        cold: _Bools = self._heat[pages] <= 0.5
        return cold

    def coldest_first(self, pages: _Ints) -> _Ints:
        """The order in which replicas of these pages (n,) give way, as indices (n,)."""
        return np.argsort(self._heat[pages], kind="stable")
