"""Every setting of a server, by concern. Flags, YAML keys and help are derived from here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from phloem.config.setting import setting, validate
from phloem.config.units import parse_bytes
from phloem.core.errors import ConfigError
from phloem.core.mesh import Mesh

__all__ = [
    "CacheOptions",
    "Config",
    "ModelOptions",
    "ParallelOptions",
    "RuntimeOptions",
    "SchedulerOptions",
    "ServerOptions",
    "TierOptions",
]

# Tokens a page on each device: small where sharing is worth more than long copies.
DEFAULT_PAGE_SIZE = {"cpu": 16, "cuda": 64}
# With more, a CPU computes long prompts no faster (docs/LOG.md), and running answers and short
# prompts wait longer for them. On GPUs nothing has been measured.
DEFAULT_PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}
DEFAULT_PREFILL_SLICE = {"cpu": 512, "cuda": 16384}
# Up to how many tokens prompts share a step. A CPU takes as long for 64 as for reading all weights
# of SmolLM2 ten times: more than that is gained by none. A GPU's steps are filled up.
PREFILL_FILL = {"cpu": 64, "cuda": 16384}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What is served, and in which form."""

    model: str = setting(
        "",
        "Hugging Face folder, .gguf file, or the name smollm2",
        positional=True,
    )
    dtype: Literal["auto", "fp32", "bf16"] = setting(
        "auto",
        "type of weights and activations; auto takes the checkpoint's",
        spellings={"float32": "fp32", "float": "fp32", "bfloat16": "bf16"},
    )
    quantization: Literal["none", "int8", "q4"] = setting(
        "none",
        "weights in memory: none: --dtype; int8: 8 bits; q4: a GGUF file's Q4 blocks as they are",
    )
    device: Literal["cpu", "cuda"] = setting(
        "cpu", "where the model runs; cuda with --cp or --tp: a GPU for each rank"
    )
    served_model_name: str | None = setting(
        None, "name that requests use; default: the last part of MODEL"
    )
    max_model_len: int | None = setting(
        None,
        "longest prompt + answer in tokens; default: the model's own limit",
        low=1,
        aliases=("context-length",),
    )

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The paged KV cache and its prefix tree."""

    page_size: int | None = setting(
        None,
        "tokens a page; default: 16 on cpu, 64 on cuda",
        low=1,
        high=1024,
        aliases=("block-size",),
    )
    num_pages: int | None = setting(
        None, "pages of each rank's device pool; default: as many as --kv-memory holds", low=1
    )
    kv_memory: str = setting("auto", "memory of each rank's device pool, such as 4GB, or auto")
    kv_dtype: Literal["auto", "fp32", "bf16", "int8", "fp8", "fp4"] = setting(
        "auto",
        "type of K and V in pages; auto: as --dtype; the last three have scales in each row",
        spellings={"float32": "fp32", "bfloat16": "bf16", "fp8_e4m3": "fp8"},
        aliases=("kv-cache-dtype",),
    )
    prefix_cache: bool = setting(
        True, "reuse the KV of prefixes seen before", aliases=("enable-prefix-caching",)
    )
    eviction_policy: Literal["lru"] = setting(
        "lru", "which cached pages go first when room is needed"
    )
    window_pool_ratio: float | None = setting(
        None,
        "window layers: pages of their pool per page of the others'; default: from the model",
        low=0.0001,
        high=1.0,
        aliases=("swa-full-tokens-ratio",),
    )
    window_checkpoint: int | None = setting(
        None,
        "window layers: tokens between kept tails; 0: ends only; default: 8 windows, least 2048",
        low=0,
    )

    def __post_init__(self) -> None:
        validate(self)
        if self.kv_memory != "auto":
            parse_bytes(self.kv_memory)
            if self.num_pages is not None:
                raise ConfigError(
                    f"--num-pages {self.num_pages} and --kv-memory {self.kv_memory} contradict "
                    "each other: give one of them"
                )

    @property
    def kv_memory_bytes(self) -> int | None:
        """The memory asked for, or None for auto."""
        return None if self.kv_memory == "auto" else parse_bytes(self.kv_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Where cached pages go when the device is full: host memory, then a directory."""

    host_memory: str = setting(
        "auto",
        "memory of the host tier, such as 16GB; 0: none; auto: none, but some with --storage",
    )
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = setting(
        "write_through",
        "which pages are copied to host and storage: all at once, those used twice, those evicted",
        spellings={
            "write-through": "write_through",
            "write-through-selective": "write_through_selective",
            "write-back": "write_back",
        },
    )
    prefetch_policy: Literal["auto", "best_effort", "wait_complete", "timeout"] = setting(
        "auto",
        "how long a queued request waits for pages that are read from storage",
        spellings={"best-effort": "best_effort", "wait-complete": "wait_complete"},
    )
    storage: str | None = setting(
        None, "directory that keeps cached pages across restarts; default: none"
    )
    storage_size: str = setting("20GB", "what the directory may hold at most")

    def __post_init__(self) -> None:
        validate(self)
        parse_bytes(self.storage_size)
        if self.host_memory not in ("auto", "0"):
            parse_bytes(self.host_memory)
        if self.storage is not None and not self.storage.strip():
            raise ConfigError("--storage must name a directory")
        if self.storage is not None and self.host_memory == "0":
            raise ConfigError(
                "--storage needs host memory to pass through: leave out --host-memory 0"
            )

    @property
    def host_memory_bytes(self) -> int | None:
        """The memory asked for (0: no host tier), or None for auto with storage."""
        if self.host_memory == "auto":
            return 0 if self.storage is None else None
        return 0 if self.host_memory == "0" else parse_bytes(self.host_memory)

    @property
    def storage_size_bytes(self) -> int:
        return parse_bytes(self.storage_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """Several ranks, a process each, that answer the same requests together."""

    cp: int = setting(
        1,
        "context-parallel ranks: the pages of the KV cache are divided among them",
        low=1,
        high=64,
    )
    tp: int = setting(
        1,
        "tensor-parallel ranks: heads and weights of every layer are divided among them",
        low=1,
        high=64,
    )
    placement: Literal["striped", "contiguous", "replicate"] = setting(
        "striped",
        "which rank owns a page: each in turn, long runs on one rank, or all of them on every rank",
    )
    remote_kv: Literal["auto", "direct", "gather_kv", "send_q"] = setting(
        "auto",
        "how ranks read others' pages: in place, as copies, by queries; auto: as measured",
        spellings={"gather-kv": "gather_kv", "send-q": "send_q"},
    )
    verify_collectives: bool = setting(
        False, "in every step all ranks compare what their copies of the cache have free"
    )
    join_timeout_s: float = setting(
        120.0,
        "seconds that ranks which torchrun has started get to find each other",
        low=1,
    )
    hot_replicas: str = setting(
        "auto",
        "part of a rank's pages for copies of others' hot ones; auto: 0.125 where they travel",
    )

    def __post_init__(self) -> None:
        validate(self)
        if self.tp > 1 and self.placement == "replicate":
            raise ConfigError(
                f"--placement replicate copies whole pages, and with --tp {self.tp} no rank "
                "computes one: use striped or contiguous"
            )
        share = self.replica_share
        if share and self.placement == "replicate":
            raise ConfigError(
                f"--hot-replicas {self.hot_replicas} has nothing to do with --placement replicate, "
                "where every rank has every page; leave it out"
            )

    @property
    def mesh(self) -> Mesh:
        """How ranks stand to each other."""
        return Mesh(tp=self.tp, cp=self.cp)

    @property
    def replica_share(self) -> float | None:
        """How much of each pool may hold replicas; None: auto. Raises ConfigError."""
        if self.hot_replicas == "auto":
            return None
        try:
            share = float(self.hot_replicas)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise ConfigError(
                f"--hot-replicas must be auto or a number from 0 to 1, got {self.hot_replicas!r}"
            )
        return share


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Which requests run together, and in what order."""

    schedule_policy: Literal["lpm", "fcfs", "hrrn", "routing_key"] = setting(
        "lpm",
        "order of the queue: longest cached prefix, first come, response ratio, routing key",
        spellings={"routing-key": "routing_key"},
    )
    max_prefill_tokens: int | None = setting(
        None,
        "prompt tokens between two tokens of an answer; default: cpu 1024, cuda 16384",
        low=1,
    )
    prefill_slice: int | None = setting(
        None,
        "most prompt tokens of one step, if there may be so many; default: cpu 512, cuda 16384",
        low=1,
    )
    max_running: int = setting(
        64,
        "requests that run at the same time",
        low=1,
        high=4096,
        aliases=("max-running-requests", "max-num-seqs"),
    )
    max_queued: int = setting(
        4096,
        "requests that may wait; more are refused with 503",
        low=1,
        aliases=("max-queued-requests",),
    )
    overlap: bool = setting(True, "plan the next step while the current one runs")

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The HTTP server."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on", low=0, high=65535)
    api_key: str | None = setting(
        None,
        "key that clients must send as a bearer token; or set PHLOEM_API_KEY",
        secret=True,
    )
    drain_timeout_s: float = setting(
        30.0, "seconds that running requests get to finish after SIGTERM", low=0
    )

    def __post_init__(self) -> None:
        validate(self)
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise ConfigError("--api-key must be non-empty ASCII text")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """The process itself."""

    threads: int = setting(
        0,
        "CPU threads of each rank; 0: one per usable core, divided among the ranks",
        low=0,
        high=1024,
    )
    kernels: Literal["auto", "native", "torch"] = setting(
        "auto", "what computes the model; auto: native where it is built and known to be faster"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "how much is logged")

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a server. Raises ConfigError if two of them contradict each other."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    tiers: TierOptions = field(default_factory=TierOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)

    def __post_init__(self) -> None:
        for name in ("max_prefill_tokens", "prefill_slice"):
            tokens = getattr(self.scheduler, name)
            if tokens is not None and tokens < self.page_size:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {tokens} is less than one page of "
                    f"{self.page_size} tokens"
                )
        if not self.cache.prefix_cache and self.tiers.host_memory_bytes != 0:
            raise ConfigError(
                "--no-prefix-cache leaves nothing to keep in --host-memory or --storage"
            )
        if self.ranks_apart:
            self._check_gpu_ranks()

    def _check_gpu_ranks(self) -> None:
        parallel = self.parallel
        if parallel.placement == "replicate":
            raise ConfigError(
                "--placement replicate writes into other ranks' memory, which ranks on GPUs do not "
                "share; leave it out"
            )
        if parallel.remote_kv == "direct":
            raise ConfigError(
                "--remote-kv direct reads other ranks' memory, which ranks on GPUs do not share: "
                "add --remote-kv send_q or --remote-kv gather_kv"
            )

    @property
    def ranks_apart(self) -> bool:
        """Ranks share no memory, on one machine either: each has a GPU of its own."""
        return self.model.device == "cuda" and self.parallel.mesh.world > 1

    @property
    def page_size(self) -> int:
        """Tokens a page, with the default of the device."""
        return self.cache.page_size or DEFAULT_PAGE_SIZE[self.model.device]

    @property
    def max_prefill_tokens(self) -> int:
        """Prompt tokens between two decodes, with the device's default: a page at least."""
        return self.scheduler.max_prefill_tokens or DEFAULT_PREFILL_TOKENS[self.model.device]

    @property
    def prefill_slice(self) -> int:
        """Prompt tokens of a step, with the device's default: a page at least."""
        asked = self.scheduler.prefill_slice or DEFAULT_PREFILL_SLICE[self.model.device]
        return max(self.page_size, min(asked, self.max_prefill_tokens))

    @property
    def prefill_fill(self) -> int:
        """Up to how many tokens a step's prompts share it."""
        return min(PREFILL_FILL[self.model.device], self.prefill_slice)
