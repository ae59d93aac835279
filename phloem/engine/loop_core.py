"""The usual core: cache, scheduler and loop over a worker that somebody else has made."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from phloem.cache import HostTier, PrefixCache, ReplicaConfig, WindowConfig
from phloem.cache.prefix_cache import MAX_OWNERS
from phloem.cache.remote_choice import RemoteChooser
from phloem.config import Config
from phloem.core.clock import Clock, MonotonicClock
from phloem.core.errors import EngineDead
from phloem.core.protocols import Worker
from phloem.core.request import GenerateRequest
from phloem.core.stats import EngineStats
from phloem.engine.commands import Command, Reply
from phloem.engine.core import BuildHooks
from phloem.engine.facts import EngineFacts, WindowFacts
from phloem.engine.operator import Operator
from phloem.engine.tier_parts import ModelSlot, TierParts
from phloem.kv.sizing import pages_for_tokens
from phloem.loop import EngineLoop
from phloem.sched import Scheduler, SchedulerConfig
from phloem.tiers import StorageKeys, TierConfig, TierController
from phloem.tiers.config import is_exclusive

__all__ = ["LoopCore", "make_loop_core", "replica_config", "window_config"]

logger = logging.getLogger(__name__)

FLUSH_S = 10.0  # the longest that an orderly shutdown writes to storage


def _healthy() -> None:
    return None


def _nobody() -> None:
    """Nobody else serves this core."""


@dataclass(frozen=True, slots=True)
class LoopCore:
    """An `EngineCore`. Owns the worker and the tiers. `failure()`: why the worker is dead, if it is
    although no step has failed. `tell`: what `farewell` calls."""

    loop: EngineLoop
    worker: Worker
    facts: EngineFacts
    operator: Operator
    tiers: TierParts | None = None
    failure: Callable[[], str | None] = _healthy
    tell: Callable[[], None] = _nobody
    held: dict[str, GenerateRequest] = field(default_factory=dict)  # until the weights are new

    def add(self, request: GenerateRequest) -> None:
        if self.operator.wants_idle:
            self.loop.scheduler.check(request)
            self.held[request.request_id] = request
        else:
            self.loop.add(request)

    def abort(self, request_id: str) -> None:
        if self.held.pop(request_id, None) is None:
            self.loop.abort(request_id)

    def command(self, command: Command, reply: Reply) -> None:
        self.operator.command(command, reply)

    def step(self) -> bool:
        failure = self.failure()
        if failure is not None:
            self.loop.die(failure)
        busy = self.loop.step()
        if self.loop.dead is not None:
            raise EngineDead(self.loop.dead)
        busy |= self.operator.advance(loop_busy=busy)
        if self.held and not self.operator.wants_idle:
            for request_id in list(self.held):
                self.loop.add(self.held.pop(request_id))
            return True
        return busy

    def flush(self) -> int:
        return self.loop.flush()

    def stats(self) -> EngineStats:
        return self.loop.stats()

    def farewell(self) -> None:
        self.tell()

    def close(self) -> None:
        self.operator.close()
        tiers = self.loop.scheduler.tiers
        if tiers is not None and self.loop.dead is None:
            left = tiers.flush(FLUSH_S)
            if left:
                logger.warning("%d pages were not written to storage in time", left)
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
    remote: RemoteChooser | None = None,
    model: ModelSlot | None = None,
) -> LoopCore:
    """Join a worker with the control plane. Takes over the worker and the tiers."""
    clock = MonotonicClock()
    num_pages, num_owners = facts.card.num_pages, facts.num_owners
    num_host_pages = 0 if tiers is None else tiers.num_host_pages
    cache = PrefixCache(
        page_size=facts.card.page_size,
        num_pages=(num_pages // num_owners,) * num_owners,
        host=HostTier(pages=num_host_pages, exclusive=is_exclusive(num_pages, num_host_pages)),
        placement=config.parallel.placement,
        eviction=config.cache.eviction_policy,
        enabled=config.cache.prefix_cache,
        window=window_config(facts.window, num_owners=num_owners, page_size=facts.card.page_size),
    )
    _keep_replicas(cache, config, facts, remote)
    options = config.scheduler
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=facts.card.max_model_len,
            max_running=options.max_running,
            # The front counts running and waiting together, and refuses before anything travels.
            # A burst that finds an idle engine is all "queued" for one pass.
            max_queued=options.max_queued + options.max_running,
            max_prefill_tokens=config.max_prefill_tokens,
            prefill_slice=config.prefill_slice,
            prefill_fill=config.prefill_fill,
            policy=options.schedule_policy,
            overlap=options.overlap,
            eos_ids=eos_ids,
            seed=int.from_bytes(os.urandom(8), "little"),  # unseeded answers differ every time
        ),
        cache,
        None if tiers is None else _controller(config, cache, tiers, clock),
        remote,
    )
    loop = EngineLoop(
        scheduler,
        worker,
        clock,
        lambda chunks: hooks.emit(list(chunks)),
        on_wait=hooks.on_wait,
    )
    return LoopCore(loop, worker, facts, Operator(loop, tiers, model), tiers)


def _keep_replicas(
    cache: PrefixCache, config: Config, facts: EngineFacts, remote: RemoteChooser | None
) -> None:
    """As the settings say. Warns where they ask for what has no effect."""
    replicas = replica_config(config, remote)
    if replicas is None:
        return
    if not cache.may_keep_replicas:
        why = f"it is for 2 to {MAX_OWNERS} owners of pages, and there are {facts.num_owners}"
    elif not facts.card.page_bytes:
        why = "all layers of this model have a window, and windows are not replicated"
    else:
        cache.keep_replicas(replicas)
        return
    if config.parallel.replica_share is not None:
        logger.warning("--hot-replicas %s has no effect: %s", config.parallel.hot_replicas, why)


def replica_config(config: Config, remote: RemoteChooser | None) -> ReplicaConfig | None:
    """Of hot pages, as asked for; auto: where others' pages are not read in place."""
    parallel = config.parallel
    if parallel.replica_share is not None:
        share = parallel.replica_share
        return ReplicaConfig(fraction=share) if share else None
    if parallel.remote_kv == "auto":
        model = None if remote is None else remote.model
        return ReplicaConfig() if model is not None and not model.rates.read_bytes_s else None
    return None if parallel.remote_kv == "direct" else ReplicaConfig()


def window_config(
    facts: WindowFacts | None, *, num_owners: int, page_size: int
) -> WindowConfig | None:
    """The windows of a model as the cache sees them; None where no layer has one."""
    if facts is None:
        return None
    return WindowConfig(
        tokens=facts.tokens,
        layers=facts.layers,
        pages=(facts.num_pages // num_owners,) * num_owners,
        host_pages=facts.host_pages,
        checkpoint=pages_for_tokens(facts.checkpoint_tokens, page_size),
    )


def _controller(
    config: Config, cache: PrefixCache, tiers: TierParts, clock: Clock
) -> TierController:
    options = TierConfig(
        write_policy=config.tiers.write_policy,
        prefetch_policy=config.tiers.prefetch_policy,
        page_bytes=tiers.page_bytes,
        window_page_bytes=tiers.window_page_bytes,
    )
    keys = StorageKeys(
        facts=tiers.key_facts,
        attached=tiers.storage.attached,
        take_gone=tiers.storage.take_gone,
    )
    return TierController(cache, tiers.transfers, clock, options, keys)
