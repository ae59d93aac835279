"""The usual core: cache, scheduler and loop over a worker that somebody else has made."""

from __future__ import annotations

import os
from dataclasses import dataclass

from phloem.cache import HostTier, PrefixCache
from phloem.config import Config
from phloem.core.clock import Clock, MonotonicClock
from phloem.core.errors import EngineDead
from phloem.core.protocols import Worker
from phloem.core.request import GenerateRequest
from phloem.core.stats import EngineStats
from phloem.engine.core import BuildHooks
from phloem.engine.facts import EngineFacts
from phloem.engine.tier_parts import TierParts
from phloem.loop import EngineLoop
from phloem.sched import Scheduler, SchedulerConfig
from phloem.tiers import TierConfig, TierController
from phloem.tiers.config import is_exclusive

__all__ = ["LoopCore", "make_loop_core"]


@dataclass(frozen=True, slots=True)
class LoopCore:
    """An `EngineCore`. Owns the worker."""

    loop: EngineLoop
    worker: Worker
    facts: EngineFacts
    tiers: TierParts | None = None

    def add(self, request: GenerateRequest) -> None:
        self.loop.add(request)

    def abort(self, request_id: str) -> None:
        self.loop.abort(request_id)

    def step(self) -> bool:
        busy = self.loop.step()
        if self.loop.dead is not None:
            raise EngineDead(self.loop.dead)
        return busy

    def flush(self) -> int:
        return self.loop.flush()

    def stats(self) -> EngineStats:
        return self.loop.stats()

    def close(self) -> None:
        self.worker.close()
        if self.tiers is not None:
            self.tiers.close()


def make_loop_core(
    config: Config,
    hooks: BuildHooks,
    *,
    worker: Worker,
    facts: EngineFacts,
    eos_ids: tuple[int, ...],
    tiers: TierParts | None = None,
) -> LoopCore:
    """Join a worker with the control plane. Takes over the worker and the tiers."""
    clock = MonotonicClock()
    num_pages = facts.card.num_pages
    num_host_pages = 0 if tiers is None else tiers.num_host_pages
    cache = PrefixCache(
        page_size=facts.card.page_size,
        num_pages=(num_pages,),
        host=HostTier(pages=num_host_pages, exclusive=is_exclusive(num_pages, num_host_pages)),
        eviction=config.cache.eviction_policy,
        enabled=config.cache.prefix_cache,
    )
    options = config.scheduler
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=facts.card.max_model_len,
            max_running=options.max_running,
            # The front counts running and waiting together, and refuses before anything travels.
            # A burst that finds an idle engine is all "queued" for one pass.
            max_queued=options.max_queued + options.max_running,
            max_prefill_tokens=options.max_prefill_tokens,
            policy=options.schedule_policy,
            overlap=options.overlap,
            eos_ids=eos_ids,
            seed=int.from_bytes(os.urandom(8), "little"),  # unseeded answers differ every time
        ),
        cache,
        None if tiers is None else _controller(config, cache, tiers, clock),
    )
    loop = EngineLoop(
        scheduler,
        worker,
        clock,
        lambda chunks: hooks.emit(list(chunks)),
        on_wait=hooks.on_wait,
    )
    return LoopCore(loop, worker, facts, tiers)


def _controller(
    config: Config, cache: PrefixCache, tiers: TierParts, clock: Clock
) -> TierController:
    options = TierConfig(write_policy=config.tiers.write_policy, page_bytes=tiers.page_bytes)
    return TierController(cache, tiers.transfers, clock, options)
