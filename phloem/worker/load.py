"""Builds a worker from a path: config, weights, pool, runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from phloem.attention import LayeredAttention
from phloem.attention.choice import AttentionChoice
from phloem.attention.remote_pages import RankPool
from phloem.config.checkpoint import read_model_config
from phloem.config.model import ModelConfig
from phloem.core.errors import ConfigError
from phloem.core.remote import LinkRates
from phloem.core.transfer import LayerGate
from phloem.kv.sizing import pages_for_tokens
from phloem.kv.spec import KVDtype, KVSpec
from phloem.models import quantisation_of
from phloem.models.native_fit import native_reads
from phloem.models.row import ALONE, Row
from phloem.models.shard import WHOLE, check_tp
from phloem.pools import DevicePool, HostArena
from phloem.pools.device import torch_dtype
from phloem.transfer import LeaderGate, PageServer, TransferEngine, TransferHooks
from phloem.worker.forward import ForwardOptions, choose_kernels, load_forward
from phloem.worker.memory import activation_bytes
from phloem.worker.pages import host_tier, kv_specs, make_pools, page_counts
from phloem.worker.peers import RankPlace
from phloem.worker.ranked import RankedWorker
from phloem.worker.replicas import Replicas
from phloem.worker.rows import RowTables
from phloem.worker.runner import Hooks, Runner
from phloem.worker.sampled import SampledTokens
from phloem.worker.torch_worker import InlineWorker, TorchWorker

__all__ = ["LoadedWorker", "WorkerOptions", "kv_dtype_of", "load_worker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How to run a model. Give `num_pages` (of each rank), or `kv_bytes` from which it is computed.

    Where layers have a window, `window_pages` and `window_host_pages` are those layers' own; None:
    as many as of the others.

    `max_model_len` None: what the model was trained for. `threads` None: PyTorch's choice.
    `inline`: run plans inside `submit` instead of on a thread.
    `host_pages`: pages of the host arena; with 0 there are no transfers.
    """

    dtype: str = "bf16"  # weights and activations: "fp32" or "bf16"
    kv_dtype: str = "auto"  # KV pages: that of the others, or any `KVDtype`
    device: str = "cpu"
    page_size: int = 16
    num_pages: int | None = None
    window_pages: int | None = None
    kv_bytes: int | None = None
    max_running: int = 64
    max_model_len: int | None = None
    max_prefill_tokens: int = 16384
    threads: int | None = None
    kernels: str = "auto"  # see `worker.forward.KERNELS`
    quantization: str = "none"  # of weights: "none", "int8" or "q4"
    hooks: Hooks = field(default_factory=Hooks)
    inline: bool = False
    host_pages: int = 0  # 0: no host tier
    window_host_pages: int | None = None
    replicate: bool = False  # of several ranks: each holds all pages
    transfer_hooks: TransferHooks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWorker:
    """A worker that is ready for plans, and the facts about it.

    `specs`, `pools`, `num_pages` (of each rank) and `hosts` are by component: full, and window if
    some layers have one. `hosts` is empty without a host tier. `rates`: of several ranks, if they
    were measured.
    """

    worker: TorchWorker | InlineWorker | RankedWorker
    config: ModelConfig
    specs: tuple[KVSpec, ...]
    pools: tuple[DevicePool, ...]
    num_pages: tuple[int, ...]
    max_model_len: int
    weight_bytes: int
    kernels: str  # what "auto" came to
    activation_bytes: int
    hosts: tuple[HostArena, ...] = ()
    transfers: TransferEngine | None = None  # close it after the worker
    rates: LinkRates | None = None
    # Blocks while it reads another checkpoint of the same configuration; what it returns puts the
    # weights in place, and is to be called while no plan is in flight. Raises ConfigError.
    reload: Callable[[Path], Callable[[], None]]

    @property
    def spec(self) -> KVSpec:
        """The state of the layers that keep all tokens."""
        return self.specs[0]

    @property
    def pool(self) -> DevicePool:
        """The pages of the layers that keep all tokens."""
        return self.pools[0]

    @property
    def host(self) -> HostArena | None:
        """The host pages of the layers that keep all tokens."""
        return self.hosts[0] if self.hosts else None

    @property
    def page_bytes(self) -> int:
        """Of a page of the layers that keep all tokens."""
        return self.spec.page_bytes


def load_worker(
    path: Path,
    options: WorkerOptions,
    *,
    place: RankPlace | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadedWorker:
    """Load the checkpoint at `path` and make a worker of it; with a `place`, one rank of several.

    `on_progress(done_bytes, total_bytes)` follows the weights. Raises ConfigError for options that
    cannot be, for a broken or unsupported checkpoint, and for memory that does not suffice.
    """
    device = _device(options.device)
    _set_threads(options.threads)
    config = read_model_config(path)
    max_len = _max_model_len(options, config)
    how = _forward_options(options, config, num_positions=max_len, place=place)
    specs = kv_specs(config, dtype=kv_dtype_of(options), page_size=options.page_size)
    num_pages = _device_pages(options, specs)
    pools = make_pools(specs, num_pages, device, dtype=how.dtype, place=place)
    layers, host_pages = config.component_layers, _host_pages(options, len(specs))
    hosts, transfers = host_tier(specs, pools, layers, host_pages, options.transfer_hooks, place)
    forward = load_forward(path, config, pools, how, on_progress)
    tables = RowTables(
        max_running=options.max_running,
        max_pages=pages_for_tokens(max_len, options.page_size),
        num_components=len(specs),
        pages_per_owner=num_pages,
        sampled=None if place is None else SampledTokens(options.max_running, place.sampled),
        copy=place.owner if place is not None and options.replicate else 0,
    )
    runner = Runner(
        forward.model,
        pools,
        attention=forward.attention,
        tables=tables,
        hooks=options.hooks,
        gate=_gate(transfers, place, pools, layers),
        place=place,
        reach=None if place is None else _reach(options, forward.attention, pools, place),
    )
    return LoadedWorker(
        worker=InlineWorker(runner, pools) if options.inline else TorchWorker(runner, pools),
        config=config,
        specs=specs,
        pools=pools,
        num_pages=num_pages,
        max_model_len=max_len,
        weight_bytes=forward.weight_bytes,
        kernels=forward.kernels,
        activation_bytes=_step_bytes(options, config, how),
        hosts=hosts,
        transfers=transfers,
        reload=partial(_reload, runner, pools, config, how),
    )


def _gate(
    transfers: TransferEngine | None,
    place: RankPlace | None,
    pools: Sequence[DevicePool],
    layers: Sequence[Sequence[int]],
) -> LayerGate | None:
    """Where this worker waits for layers that are loaded; None: others do, or nobody need."""
    if place is None or not place.links:
        return transfers
    if place.peers.rank:
        (link,) = place.links
        return PageServer(link, pools, layers)
    return None if transfers is None else LeaderGate(transfers)


def _step_bytes(options: WorkerOptions, config: ModelConfig, how: ForwardOptions) -> int:
    return activation_bytes(
        how.shard.config(config),
        options.max_prefill_tokens,
        dtype=_dtype(options.dtype),
        max_running=options.max_running,
        tp=how.shard.count,
    )


def _reach(
    options: WorkerOptions,
    direct: LayeredAttention,
    pools: Sequence[DevicePool],
    place: RankPlace,
) -> Replicas | AttentionChoice:
    """How one rank of several comes by the pages that others compute."""
    owner = place.owner
    if options.replicate:
        return Replicas(pools, direct.layers, owner)
    first = owner if place.pools is not None else 0  # pools before this rank's in its memory
    own = [
        RankPool(
            pool.buffer,
            owner,
            pool.num_pages,
            first_slot=first * pool.num_pages,
            mapped=place.pools is not None,
        )
        for pool in pools
    ]
    return AttentionChoice(direct, own, place.group)


def _forward_options(
    options: WorkerOptions,
    config: ModelConfig,
    *,
    num_positions: int,
    place: RankPlace | None,
) -> ForwardOptions:
    device, quantisation = _device(options.device), quantisation_of(options.quantization)
    dtype = _dtype(options.dtype)
    lacking = native_reads(kv_dtype_of(options), config)
    shard = WHOLE if place is None else place.shard
    check_tp(config, shard.count)
    own = shard.config(config)
    return ForwardOptions(
        kernels=choose_kernels(options.kernels, device, own, quantisation, lacking=lacking),
        quantisation=quantisation,
        dtype=torch_dtype(dtype),
        device=device,
        threads=options.threads,
        num_positions=num_positions,
        shard=shard,
        row=ALONE if place is None else Row(place.row),
    )


def _device_pages(options: WorkerOptions, specs: tuple[KVSpec, ...]) -> tuple[int, ...]:
    return page_counts(
        specs,
        num_pages=options.num_pages,
        window_pages=options.window_pages,
        kv_bytes=options.kv_bytes,
    )


def _host_pages(options: WorkerOptions, num_components: int) -> tuple[int, ...]:
    window = options.window_host_pages
    return (options.host_pages, options.host_pages if window is None else window)[:num_components]


def _reload(
    runner: Runner,
    pools: tuple[DevicePool, ...],
    config: ModelConfig,
    how: ForwardOptions,
    path: Path,
) -> Callable[[], None]:
    found = read_model_config(path)
    if found != config:
        raise ConfigError(
            f"{path} is another model ({found.architecture}, {found.num_layers} layers); weights "
            "can be updated only by those of the same architecture and configuration"
        )
    forward = load_forward(path, config, pools, how)

    def swap() -> None:
        runner.replace(forward.model, forward.attention)

    return swap


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    if threads < 1:
        raise ConfigError(f"threads must be at least 1, got {threads}")
    torch.set_num_threads(threads)


def _dtype(name: str, *, packed: bool = False) -> KVDtype:
    """A dtype by its name: of numbers, or, where that can be, of packed rows as well."""
    known = {d.value: d for d in KVDtype if packed or not d.is_packed}
    if name not in known:
        raise ConfigError(f"unknown dtype {name!r}; supported: {', '.join(known)}")
    return known[name]


def kv_dtype_of(options: WorkerOptions) -> KVDtype:
    """In what pages are stored. Raises ConfigError."""
    name = options.dtype if options.kv_dtype == "auto" else options.kv_dtype
    return _dtype(name, packed=True)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}; supported: cpu, cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}; supported: cpu, cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but PyTorch finds no usable GPU")
    return device


def _max_model_len(options: WorkerOptions, config: ModelConfig) -> int:
    length = config.max_position if options.max_model_len is None else options.max_model_len
    if not 1 <= length <= config.max_position:
        raise ConfigError(
            f"max_model_len must be between 1 and the model's {config.max_position}, got {length}"
        )
    if options.max_running < 1:
        raise ConfigError(f"max_running must be at least 1, got {options.max_running}")
    return length
