"""The real core: the only module of the front that brings torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from phloem.config import Config
from phloem.config.checkpoint import four_bit_blocks
from phloem.core.errors import ConfigError
from phloem.engine.api import ModelCard
from phloem.engine.build_pools import Pools, plan_pools, resolve_dtype
from phloem.engine.build_ranks import RankMaker, starting_ranks, starting_ranks_apart
from phloem.engine.build_tiers import loaded_key_facts, tier_parts
from phloem.engine.core import BuildHooks
from phloem.engine.facts import EngineFacts
from phloem.engine.loop_core import LoopCore, make_loop_core
from phloem.engine.models import ResolvedModel, resolve_model
from phloem.engine.remote_kv import copies_bytes, describe_remote, measured, remote_chooser
from phloem.engine.resources import usable_cpus
from phloem.engine.sampling_defaults import sampling_defaults
from phloem.engine.tier_parts import ModelSlot
from phloem.kv.keys import KeyFacts
from phloem.worker import Hooks, LoadedWorker, RankPlace, WorkerOptions, load_worker

__all__ = ["build_core", "build_core_with", "worker_options"]


def build_core(config: Config, hooks: BuildHooks, eos_ids: tuple[int, ...]) -> LoopCore:
    """Load the model and join it with cache, scheduler and loop. Raises ConfigError."""
    make_ranks = starting_ranks_apart if config.ranks_apart else starting_ranks
    return build_core_with(config, hooks, eos_ids, make_ranks)


def build_core_with(
    config: Config,
    hooks: BuildHooks,
    eos_ids: tuple[int, ...],
    make_ranks: RankMaker,
    *,
    ranks_here: int | None = None,
    local_rank: int = 0,
) -> LoopCore:
    """The same with other ranks that `make_ranks` brings in; `ranks_here`: how many of all share
    this machine, None: all of them; `local_rank`: which one of these this is."""
    start_s = time.monotonic()
    model = resolve_model(config.model.model)
    dtype = resolve_dtype(config, model.path)
    pools = plan_pools(config, model.path, dtype, ranks_here=ranks_here, local_rank=local_rank)

    def on_progress(done: int, total: int) -> None:
        hooks.on_load(done, total, "loading weights")

    def load(pools: Pools, place: RankPlace | None) -> LoadedWorker:
        options = worker_options(config, Hooks(on_layer=hooks.on_layer), dtype, pools)
        return load_worker(model.path, options, place=place, on_progress=on_progress)

    def join(pools: Pools, loaded: LoadedWorker) -> LoopCore:
        facts = _facts(config, pools, loaded, model=model, dtype=dtype, start_s=start_s)
        every_eos = tuple(dict.fromkeys((*eos_ids, *loaded.config.eos_ids)))
        return make_loop_core(
            config,
            hooks,
            worker=loaded.worker,
            facts=facts,
            eos_ids=every_eos,
            tiers=tier_parts(config, loaded, model.path),
            remote=remote_chooser(config, loaded, pools.axis),
            model=ModelSlot(partial(_load_weights, loaded, config.model.quantization)),
        )

    if pools.mesh.world == 1:
        return join(pools, load(pools, None))
    with make_ranks(config, pools) as ranks:
        pools = ranks.pools
        loaded = ranks.joined(load(pools, ranks.place))
        core = join(pools, measured(config, loaded, pools.axis))
        return ranks.connected(core, hooks, verify=config.parallel.verify_collectives)


def _load_weights(loaded: LoadedWorker, quantization: str, model: str) -> Callable[[], KeyFacts]:
    path = resolve_model(model).path
    swap = loaded.reload(path)
    facts = loaded_key_facts(path, loaded, weight_quantisation=quantization)

    def put_in_place() -> KeyFacts:
        swap()
        return facts

    return put_in_place


def worker_options(
    config: Config, hooks: Hooks, dtype: str, pools: Pools, *, inline: bool = False
) -> WorkerOptions:
    """What one rank is told to load; `pools.host`: zeros but for the rank that moves pages."""
    windows = len(pools.specs) > 1
    return WorkerOptions(
        dtype=dtype,
        kv_dtype=config.cache.kv_dtype,
        device=pools.runs_on,
        page_size=config.page_size,
        num_pages=pools.device[0],
        window_pages=pools.device[1] if windows else None,
        max_running=config.scheduler.max_running,
        max_model_len=config.model.max_model_len,
        max_prefill_tokens=config.prefill_slice,
        threads=_threads(config, pools),
        kernels=config.runtime.kernels,
        quantization=config.model.quantization,
        hooks=hooks,
        inline=inline,
        host_pages=pools.host[0],
        window_host_pages=pools.host[1] if windows else None,
        replicate=config.parallel.placement == "replicate",
    )


def _threads(config: Config, pools: Pools) -> int:
    """Of each rank."""
    return config.runtime.threads or max(1, usable_cpus() // pools.ranks_here)


def _distinct(config: Config, loaded: LoadedWorker, num_pages: int) -> int:
    """How many different pages those of all ranks are."""
    return loaded.num_pages[0] if config.parallel.placement == "replicate" else num_pages


def _context(config: Config, loaded: LoadedWorker, num_pages: int) -> int:
    """The longest prompt + completion: no request may need more pages than there are."""
    capacity = num_pages * loaded.spec.page_size
    asked = config.model.max_model_len
    if asked is not None and asked > capacity:
        raise ConfigError(
            f"--max-model-len {asked} needs more than the {num_pages} KV pages "
            f"({capacity} tokens); lower it, or raise --kv-memory or --num-pages"
        )
    return min(loaded.max_model_len, capacity)


def _facts(
    config: Config,
    pools: Pools,
    loaded: LoadedWorker,
    *,
    model: ResolvedModel,
    dtype: str,
    start_s: float,
) -> EngineFacts:
    num_pages = loaded.num_pages[0] * pools.axis.size
    card = ModelCard(
        name=config.model.served_model_name or model.name,
        path=str(model.path),
        architecture=loaded.config.architecture,
        dtype=dtype,
        device=config.model.device,
        vocab_size=loaded.config.vocab_size,
        max_model_len=_context(config, loaded, _distinct(config, loaded, num_pages)),
        page_size=config.page_size,
        num_pages=num_pages,
        page_bytes=loaded.page_bytes,
        created_s=int(time.time()),
        sampling=sampling_defaults(config.model.model, model.path),
    )
    return EngineFacts(
        card=card,
        weight_bytes=loaded.weight_bytes,
        activation_bytes=loaded.activation_bytes + copies_bytes(config, loaded, pools.axis),
        threads=_threads(config, pools),
        load_s=time.monotonic() - start_s,
        prefix_cache=config.cache.prefix_cache,
        schedule_policy=config.scheduler.schedule_policy,
        kernels=loaded.kernels,
        kv_dtype=loaded.spec.dtype.value,
        quantization=config.model.quantization,
        four_bit_blocks=four_bit_blocks(model.path),
        host_pages=pools.host[0],
        storage=config.tiers.storage,
        window=pools.window,
        num_owners=pools.axis.size,
        mesh=pools.mesh,
        placement=config.parallel.placement,
        remote_kv=describe_remote(config, loaded.rates),
    )
