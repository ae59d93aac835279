"""How large the pools of a model are: pages on the device and the host, by component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from phloem.config import Config
from phloem.config.checkpoint import read_model_config
from phloem.config.units import format_bytes
from phloem.core.errors import ConfigError
from phloem.core.mesh import ONE_RANK, Mesh, ShardAxis
from phloem.engine.build_tiers import host_pages
from phloem.engine.facts import WindowFacts
from phloem.engine.rank_device import rank_device
from phloem.engine.resources import available_memory_bytes, default_kv_bytes
from phloem.kv.sizing import PoolDemand, default_checkpoint, pool_pages, pool_pages_beside
from phloem.kv.spec import KVDtype, KVSpec
from phloem.models.shard import check_tp
from phloem.worker import kv_specs

__all__ = ["Pools", "plan_pools", "resolve_dtype"]

_KV_SHARE_OF_GPU = 0.5  # of the memory free before the weights are loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Pages by component; `device`: of each owner, `host`: of the machine. `checkpoint`: tokens
    between kept tails of windows; 0: ends only. `ranks_here`: of all, those on this machine.
    `runs_on`: the device of this rank, as PyTorch calls it."""

    specs: tuple[KVSpec, ...]
    device: tuple[int, ...]
    host: tuple[int, ...]
    checkpoint: int = 0
    mesh: Mesh = ONE_RANK
    ranks_here: int = 1
    runs_on: str = "cpu"

    @property
    def axis(self) -> ShardAxis:
        """The owners of pages: ranks, or rows of ranks that hold their heads of each page."""
        return self.specs[0].shard_axis(self.mesh)

    def resized(
        self, *, device: tuple[int, ...] | None = None, host: tuple[int, ...] | None = None
    ) -> Pools:
        """The same with other numbers of pages."""
        return replace(self, device=device or self.device, host=host or self.host)

    @property
    def window(self) -> WindowFacts | None:
        """What the control plane must know of the second component; None without one."""
        if len(self.specs) == 1:
            return None
        spec = self.specs[1]
        assert spec.retention is not None, "the second component is the window"
        return WindowFacts(
            tokens=spec.retention,
            layers=spec.num_layers,
            num_pages=self.device[1] * self.axis.size,
            page_bytes=spec.page_bytes,
            host_pages=self.host[1],
            checkpoint_tokens=self.checkpoint,
        )


def resolve_dtype(config: Config, path: Path) -> str:
    """The type of weights and pages: as asked, or the checkpoint's."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return read_model_config(path).dtype


def plan_pools(
    config: Config,
    path: Path,
    dtype: str,
    *,
    ranks_here: int | None = None,
    local_rank: int = 0,
) -> Pools:
    """Divide the memory that the settings name. Raises ConfigError if it cannot be.

    `ranks_here` ranks (None: all) share this machine, of which this is number `local_rank`: what is
    taken when nothing is named is divided among them, unless each has a GPU. Pages are whole: what
    `ranks_per_owner` ranks hold between them, in memory that they share or each its part, takes as
    much of each rank.
    """
    mesh, model = config.parallel.mesh, read_model_config(path)
    check_tp(model, mesh.tp)
    ranks_here = ranks_here or mesh.world
    runs_on = rank_device(config, local_rank, ranks_here)
    pages = dtype if config.cache.kv_dtype == "auto" else config.cache.kv_dtype
    specs = kv_specs(model, dtype=KVDtype(pages), page_size=config.page_size)
    window = specs[-1].retention
    each = specs[0].shard_axis(mesh).ranks_per_owner
    demand = PoolDemand(
        max_model_len=config.model.max_model_len or model.max_position,
        max_running=config.scheduler.max_running,
        max_prefill_tokens=config.prefill_slice,
        checkpoint=0 if window is None else _checkpoint(config, window),
        ratio=config.cache.window_pool_ratio,
    )
    if config.cache.num_pages is not None:
        device = pool_pages_beside(specs, config.cache.num_pages, demand)
    else:
        rank_bytes = config.cache.kv_memory_bytes or _auto_kv_bytes(runs_on, ranks_here)
        device = pool_pages(specs, each * rank_bytes, demand)
    asked = ranks_here * _num_bytes(specs, device) // each
    # One machine holds the host pages of all ranks, wherever these are.
    of_all = mesh.world * _num_bytes(specs, device) // each
    host = host_pages(config, specs, device_bytes=of_all, demand=demand)
    _check_memory(asked if config.model.device == "cpu" else 0, _num_bytes(specs, host))
    return Pools(
        specs=specs,
        device=device,
        host=host,
        checkpoint=demand.checkpoint,
        mesh=mesh,
        ranks_here=ranks_here,
        runs_on=runs_on,
    )


def _checkpoint(config: Config, window: int) -> int:
    asked = config.cache.window_checkpoint
    return default_checkpoint(window) if asked is None else asked


def _num_bytes(specs: Sequence[KVSpec], num_pages: Sequence[int]) -> int:
    return sum(spec.page_bytes * pages for spec, pages in zip(specs, num_pages, strict=True))


def _auto_kv_bytes(device: str, ranks_here: int) -> int:
    """Of one of the ranks on this machine."""
    if device != "cpu" and torch.cuda.is_available():  # if not, load_worker says so
        free_bytes, _ = torch.cuda.mem_get_info(torch.device(device))
        return int(free_bytes * _KV_SHARE_OF_GPU)
    return default_kv_bytes(available_memory_bytes()) // ranks_here


def _check_memory(kv_bytes: int, host_bytes: int) -> None:
    """Pages are backed by memory only when they are first written: too many would kill it later."""
    available = available_memory_bytes()
    asked = kv_bytes + host_bytes
    if available is None or asked <= available:
        return
    if host_bytes == 0:
        what, lower = "the KV cache", "--num-pages or --kv-memory"
    else:
        what, lower = "the KV cache and its host tier", "--kv-memory or --host-memory"
    raise ConfigError(
        f"{what} would take {format_bytes(asked)}, but only {format_bytes(available)} "
        f"of memory are available; lower {lower}"
    )
