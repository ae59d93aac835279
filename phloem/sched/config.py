"""What the scheduler must know before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from phloem.core.errors import ConfigError
from phloem.sched.packing import Slice

__all__ = ["SchedulerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and switches. Raises ConfigError for values that cannot be."""

    max_model_len: int  # positions that the worker can compute: prompt + output - 1 fit in it
    max_running: int = 64
    max_queued: int = 4096
    max_prefill_tokens: int = 16384  # between two tokens of a running answer
    prefill_slice: int | None = None  # of these in one step; None: all of them
    prefill_fill: int | None = None  # see `packing.Slice`; None: the whole slice
    policy: str = "lpm"
    overlap: bool = True  # plan step k+1 while step k runs
    headroom_tokens: int = 32  # kept free ahead of each running request when others are let in
    eos_ids: tuple[int, ...] = ()
    seed: int = 0  # of the seeds drawn for requests that bring none

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_running", "max_queued", "max_prefill_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        for name in ("prefill_slice", "prefill_fill"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.headroom_tokens < 0:
            raise ConfigError(f"headroom_tokens must not be negative, got {self.headroom_tokens}")

    def prefill_step(self, page_size: int) -> Slice:
        """The prompt tokens of a step."""
        tokens = min(self.prefill_slice or self.max_prefill_tokens, self.max_prefill_tokens)
        return Slice(tokens, min(self.prefill_fill or tokens, tokens), page_size)
