"""The real core: the only module of the front that brings torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from phloem.config import Config
from phloem.config.checkpoint import four_bit_blocks, read_model_config
from phloem.core.errors import ConfigError
from phloem.engine.api import ModelCard
from phloem.engine.build_pools import Pools, plan_pools
from phloem.engine.build_tiers import loaded_key_facts, tier_parts
from phloem.engine.core import BuildHooks
from phloem.engine.facts import EngineFacts
from phloem.engine.loop_core import LoopCore, make_loop_core
from phloem.engine.models import resolve_model
from phloem.engine.resources import usable_cpus
from phloem.engine.sampling_defaults import sampling_defaults
from phloem.engine.tier_parts import ModelSlot
from phloem.kv.keys import KeyFacts
from phloem.worker import Hooks, LoadedWorker, WorkerOptions, load_worker

__all__ = ["build_core"]


def build_core(config: Config, hooks: BuildHooks, eos_ids: tuple[int, ...]) -> LoopCore:
    """Load the model and join it with cache, scheduler and loop. Raises ConfigError."""
    start_s = time.monotonic()
    model = resolve_model(config.model.model)
    dtype = _dtype(config, model.path)
    pools = plan_pools(config, model.path, dtype)
    options = _worker_options(config, hooks, dtype, pools)
    loaded = load_worker(
        model.path,
        options,
        on_progress=lambda done, total: hooks.on_load(done, total, "loading weights"),
    )
    tiers = tier_parts(config, loaded, model.path)
    name = config.model.served_model_name or model.name
    facts = _facts(config, options, loaded, name=name, path=str(model.path), start_s=start_s)
    facts = replace(facts, window=pools.window)
    every_eos = tuple(dict.fromkeys((*eos_ids, *loaded.config.eos_ids)))
    return make_loop_core(
        config,
        hooks,
        worker=loaded.worker,
        facts=facts,
        eos_ids=every_eos,
        tiers=tiers,
        model=ModelSlot(partial(_load_weights, loaded, options.quantization)),
    )


def _load_weights(loaded: LoadedWorker, quantization: str, model: str) -> Callable[[], KeyFacts]:
    path = resolve_model(model).path
    swap = loaded.reload(path)
    facts = loaded_key_facts(path, loaded, weight_quantisation=quantization)

    def put_in_place() -> KeyFacts:
        swap()
        return facts

    return put_in_place


def _dtype(config: Config, path: Path) -> str:
    if config.model.dtype != "auto":
        return config.model.dtype
    return read_model_config(path).dtype


def _worker_options(config: Config, hooks: BuildHooks, dtype: str, pools: Pools) -> WorkerOptions:
    windows = len(pools.specs) > 1
    return WorkerOptions(
        dtype=dtype,
        kv_dtype=config.cache.kv_dtype,
        device=config.model.device,
        page_size=config.page_size,
        num_pages=pools.device[0],
        window_pages=pools.device[1] if windows else None,
        max_running=config.scheduler.max_running,
        max_model_len=config.model.max_model_len,
        max_prefill_tokens=config.scheduler.max_prefill_tokens,
        threads=config.runtime.threads or usable_cpus(),
        kernels=config.runtime.kernels,
        quantization=config.model.quantization,
        hooks=Hooks(on_layer=hooks.on_layer),
        host_pages=pools.host[0],
        window_host_pages=pools.host[1] if windows else None,
    )


def _context(config: Config, loaded: LoadedWorker) -> int:
    """The longest prompt + completion: no request may need more pages than there are."""
    capacity = loaded.num_pages[0] * loaded.spec.page_size
    asked = config.model.max_model_len
    if asked is not None and asked > capacity:
        raise ConfigError(
            f"--max-model-len {asked} needs more than the {loaded.num_pages[0]} KV pages "
            f"({capacity} tokens); lower it, or raise --kv-memory or --num-pages"
        )
    return min(loaded.max_model_len, capacity)


def _facts(
    config: Config,
    options: WorkerOptions,
    loaded: LoadedWorker,
    *,
    name: str,
    path: str,
    start_s: float,
) -> EngineFacts:
    card = ModelCard(
        name=name,
        path=path,
        architecture=loaded.config.architecture,
        dtype=options.dtype,
        device=options.device,
        vocab_size=loaded.config.vocab_size,
        max_model_len=_context(config, loaded),
        page_size=options.page_size,
        num_pages=loaded.num_pages[0],
        page_bytes=loaded.page_bytes,
        created_s=int(time.time()),
        sampling=sampling_defaults(config.model.model, Path(path)),
    )
    return EngineFacts(
        card=card,
        weight_bytes=loaded.weight_bytes,
        activation_bytes=loaded.activation_bytes,
        threads=options.threads or 1,
        load_s=time.monotonic() - start_s,
        prefix_cache=config.cache.prefix_cache,
        schedule_policy=config.scheduler.schedule_policy,
        kernels=loaded.kernels,
        kv_dtype=loaded.spec.dtype.value,
        quantization=options.quantization,
        four_bit_blocks=four_bit_blocks(Path(path)),
        host_pages=options.host_pages,
        storage=config.tiers.storage,
    )
