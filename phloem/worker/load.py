"""Builds a worker from a path: config, weights, pool, runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from phloem.config.checkpoint import read_model_config
from phloem.config.model import ModelConfig
from phloem.core.clock import MonotonicClock
from phloem.core.errors import ConfigError
from phloem.kv.layout import PageLayout, default_head_groups
from phloem.kv.sizing import num_pages_for, pages_for_tokens
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.models import quantisation_of
from phloem.pools import DevicePool, HostArena
from phloem.pools.device import torch_dtype
from phloem.transfer import TransferEngine, TransferHooks, make_copier
from phloem.worker.forward import ForwardOptions, choose_kernels, load_forward
from phloem.worker.memory import activation_bytes
from phloem.worker.rows import RowTables
from phloem.worker.runner import Hooks, Runner
from phloem.worker.torch_worker import InlineWorker, TorchWorker

__all__ = ["LoadedWorker", "WorkerOptions", "kv_spec", "load_worker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How to run a model. Give `num_pages`, or `kv_bytes` from which it is computed.

    `max_model_len` None: what the model was trained for. `threads` None: PyTorch's choice.
    `inline`: run plans inside `submit` instead of on a thread.
    `host_pages`: pages of the host arena; with 0 there are no transfers.
    """

    dtype: str = "bf16"  # weights, activations and KV: "fp32" or "bf16"
    device: str = "cpu"
    page_size: int = 16
    num_pages: int | None = None
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
    transfer_hooks: TransferHooks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWorker:
    """A worker that is ready for plans, and the facts about it."""

    worker: TorchWorker | InlineWorker
    config: ModelConfig
    spec: KVSpec
    pool: DevicePool
    num_pages: int
    max_model_len: int
    weight_bytes: int
    kernels: str  # what "auto" came to
    activation_bytes: int
    host: HostArena | None = None
    transfers: TransferEngine | None = None  # close it after the worker
    # Blocks while it reads another checkpoint of the same configuration; what it returns puts the
    # weights in place, and is to be called while no plan is in flight. Raises ConfigError.
    reload: Callable[[Path], Callable[[], None]]

    @property
    def page_bytes(self) -> int:
        return self.spec.page_bytes


def kv_spec(config: ModelConfig, *, dtype: KVDtype, page_size: int) -> KVSpec:
    """The KV state of a model's layers."""
    return KVSpec(
        kind=AttentionKind.GQA,
        dtype=dtype,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
    )


def load_worker(
    path: Path,
    options: WorkerOptions,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadedWorker:
    """Load the checkpoint at `path` and make a worker of it.

    `on_progress(done_bytes, total_bytes)` follows the weights. Raises ConfigError for options that
    cannot be, for a broken or unsupported checkpoint, and for memory that does not suffice.
    """
    dtype, device = _dtype(options.dtype), _device(options.device)
    if options.threads is not None:
        if options.threads < 1:
            raise ConfigError(f"threads must be at least 1, got {options.threads}")
        torch.set_num_threads(options.threads)
    config = read_model_config(path)
    max_len = _max_model_len(options, config)
    how = _forward_options(options, config, num_positions=max_len)
    spec = kv_spec(config, dtype=dtype, page_size=options.page_size)
    num_pages = _num_pages(options, spec)
    layout = PageLayout(spec, num_pages, default_head_groups(config.num_kv_heads))
    pool = DevicePool(layout, device=device)
    arena, transfers = _host_tier(options, pool)
    forward = load_forward(path, config, pool, how, on_progress)
    runner = Runner(
        forward.model,
        pool,
        attention=forward.attention,
        tables=RowTables(
            max_running=options.max_running,
            max_pages=pages_for_tokens(max_len, options.page_size),
        ),
        hooks=options.hooks,
        gate=transfers,
    )
    return LoadedWorker(
        worker=InlineWorker(runner, pool) if options.inline else TorchWorker(runner, pool),
        config=config,
        spec=spec,
        pool=pool,
        num_pages=num_pages,
        max_model_len=max_len,
        weight_bytes=forward.weight_bytes,
        kernels=forward.kernels,
        activation_bytes=activation_bytes(
            config, options.max_prefill_tokens, dtype=dtype, max_running=options.max_running
        ),
        host=arena,
        transfers=transfers,
        reload=partial(_reload, runner, pool, config, how),
    )


def _forward_options(
    options: WorkerOptions, config: ModelConfig, *, num_positions: int
) -> ForwardOptions:
    device, quantisation = _device(options.device), quantisation_of(options.quantization)
    return ForwardOptions(
        kernels=choose_kernels(options.kernels, device, config, quantisation),
        quantisation=quantisation,
        dtype=torch_dtype(_dtype(options.dtype)),
        device=device,
        threads=options.threads,
        num_positions=num_positions,
    )


def _reload(
    runner: Runner, pool: DevicePool, config: ModelConfig, how: ForwardOptions, path: Path
) -> Callable[[], None]:
    found = read_model_config(path)
    if found != config:
        raise ConfigError(
            f"{path} is another model ({found.architecture}, {found.num_layers} layers); weights "
            "can be updated only by those of the same architecture and configuration"
        )
    forward = load_forward(path, config, pool, how)

    def swap() -> None:
        runner.replace(forward.model, forward.attention)

    return swap


def _host_tier(
    options: WorkerOptions, pool: DevicePool
) -> tuple[HostArena | None, TransferEngine | None]:
    if options.host_pages < 0:
        raise ConfigError(f"host_pages must be at least 0, got {options.host_pages}")
    if options.host_pages == 0:
        return None, None
    arena = HostArena(replace(pool.layout, num_pages=options.host_pages))
    engine = TransferEngine(
        arena, make_copier(pool, arena), MonotonicClock(), hooks=options.transfer_hooks
    )
    return arena, engine


def _dtype(name: str) -> KVDtype:
    try:
        return KVDtype(name)
    except ValueError:
        known = ", ".join(d.value for d in KVDtype)
        raise ConfigError(f"unknown dtype {name!r}; supported: {known}") from None


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


def _num_pages(options: WorkerOptions, spec: KVSpec) -> int:
    if (options.num_pages is None) == (options.kv_bytes is None):
        raise ConfigError("give either num_pages or kv_bytes")
    if options.kv_bytes is not None:
        return num_pages_for(spec, options.kv_bytes)
    assert options.num_pages is not None, "checked above"
    if options.num_pages < 1:
        raise ConfigError(f"num_pages must be at least 1, got {options.num_pages}")
    return options.num_pages
