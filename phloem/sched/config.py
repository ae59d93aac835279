"""What the scheduler must know before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from phloem.core.errors import ConfigError

__all__ = ["SchedulerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and switches. Raises ConfigError for values that cannot be."""

    max_model_len: int  # positions that the worker can compute: prompt + output - 1 fit in it
    max_running: int = 64
    max_queued: int = 4096
    max_prefill_tokens: int = 16384  # per step; decodes (at most max_running) come on top
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
        if self.headroom_tokens < 0:
            raise ConfigError(f"headroom_tokens must not be negative, got {self.headroom_tokens}")
