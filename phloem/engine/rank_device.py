"""Where a rank runs: on the CPU, or on a GPU of its own."""

from __future__ import annotations

import torch

from phloem.config import Config
from phloem.core.errors import ConfigError

__all__ = ["rank_device"]


def rank_device(config: Config, local_rank: int, ranks_here: int) -> str:
    """What PyTorch calls the device of rank `local_rank` of the `ranks_here` on this machine.

    GPUs are taken by their numbers, so each process has to see all of them. Raises ConfigError if
    there are fewer than ranks.
    """
    if not config.ranks_apart:
        return config.model.device  # if there is none, load_worker says so
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < ranks_here:
        raise ConfigError(
            f"--device cuda with {ranks_here} ranks on this machine needs as many GPUs, but "
            f"PyTorch finds {count or 'none that it can use'}"
        )
    return f"cuda:{local_rank}"
