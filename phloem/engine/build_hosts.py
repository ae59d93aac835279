"""The core of rank 0 where somebody else has started all ranks, on one machine or several."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from phloem.config import Config
from phloem.config.launch import check_launch, launch_from
from phloem.core.errors import ConfigError
from phloem.engine.build import build_core_with
from phloem.engine.build_pools import Pools
from phloem.engine.build_ranks import RankBuild, agreed, check_ranks
from phloem.engine.core import BuildHooks
from phloem.engine.joined_ranks import JoinedRanks, SeatedRanks
from phloem.engine.loop_core import LoopCore

__all__ = ["build_core"]


def build_core(config: Config, hooks: BuildHooks, eos_ids: tuple[int, ...]) -> LoopCore:
    """As `build.build_core`, of the process that the environment makes rank 0."""
    launch = launch_from(os.environ)
    if launch is None or launch.rank != 0:
        raise ConfigError("this is not rank 0 of several processes; torchrun sets RANK")
    check_launch(config, launch)

    @contextmanager
    def joining_ranks(config: Config, pools: Pools) -> Iterator[RankBuild]:
        timeout_s = config.parallel.join_timeout_s
        if launch.on_one_machine and not config.ranks_apart:
            check_ranks(config, pools)
            ranks: JoinedRanks = SeatedRanks(launch, timeout_s, pools.axis, len(pools.specs))
        else:
            ranks = JoinedRanks(launch, timeout_s, pools.axis, pools.runs_on)
        with agreed(ranks, config, pools) as build:
            yield build

    return build_core_with(
        config,
        hooks,
        eos_ids,
        joining_ranks,
        ranks_here=launch.local_size,
        local_rank=launch.local_rank,
    )
