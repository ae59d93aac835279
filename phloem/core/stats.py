"""Snapshots of the engine's counters: what `/metrics`, `/server_info` and benches read."""

from __future__ import annotations

from dataclasses import dataclass, field

from phloem.core.remote import LinkRates
from phloem.core.request import CachedTokens

__all__ = [
    "AGE_BOUNDS_S",
    "AgeStats",
    "CacheStats",
    "EngineStats",
    "RemoteStats",
    "ReplicaStats",
    "TierStats",
    "TransferStats",
    "WindowStats",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStats:
    """The window component's pages: free + evictable + locked = total at every moment."""

    tokens: int  # the window, the token itself included
    layers: int
    checkpoint_pages: int  # from one kept tail to the next; 0: only ends are kept
    total_pages: int
    free_pages: int
    evictable_pages: int
    locked_pages: int
    evicted_pages_total: int = 0  # the prefixes that needed them live on in the other layers
    host_total_pages: int = 0  # the host arena for windows
    host_free_pages: int = 0
    host_pages: int = 0  # of the tree; the rest are written or read by transfers
    host_evicted_pages_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """Copies of pages on ranks that do not own them; they give way to anything else."""

    pages: int
    most_pages: int  # that there may be
    made_pages_total: int = 0
    served_pages_total: int = 0  # reads of a page by a row in a step that needed no other rank
    dropped_pages_total: tuple[tuple[str, int], ...] = ()  # by reason


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """The prefix cache. Pages: free + evictable + locked + replicas = total at every moment."""

    page_size: int
    total_pages: int
    free_pages: int
    evictable_pages: int  # committed, and no running request holds them
    locked_pages: int  # held by running requests: committed or being computed
    nodes: int
    evicted_pages_total: int = 0
    evicted_then_requested_pages_total: int = 0  # found among the ghosts by a later request
    demoted_pages_total: int = 0  # evicted from the device, and still on the host
    unbacked_pages_total: int = 0  # evicted from the device without a host copy
    host_total_pages: int = 0  # the host arena; 0: there is no host tier
    host_free_pages: int = 0
    host_pages: int = 0  # of the tree; the rest are written or read by transfers
    host_evicted_pages_total: int = 0
    window: WindowStats | None = None  # None: no layer has a window
    replicas: ReplicaStats | None = None  # None: none are made


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """One way between two tiers. `window_*`: of the totals, the part of window state."""

    kind: str  # TransferKind.value
    in_flight: int = 0
    pages_total: int = 0
    bytes_total: int = 0
    seconds_total: float = 0.0
    failed_pages_total: int = 0
    bandwidth: float = 0.0  # bytes a second, as the cost model has it; 0: not measured
    window_pages_total: int = 0
    window_bytes_total: int = 0


AGE_BOUNDS_S = (1.0, 10.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 14400.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeStats:
    """How long pages had not been used when something happened to them."""

    event: str  # "hit" or "evicted"
    tier: str  # "device" or "host"
    counts: tuple[int, ...] = ()  # pages, by AGE_BOUNDS_S, the last number beyond them
    sum_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """The tiers below the device."""

    write_policy: str
    prefetch_policy: str
    transfers: tuple[TransferStats, ...] = ()
    queued_backups: int = 0
    held_host_pages: int = 0  # quarantined: storage may still touch them
    dropped_pages_total: tuple[tuple[str, int], ...] = ()  # not copied, by reason
    load_choices_total: tuple[tuple[str, int], ...] = ()  # requests: load, part, recompute
    load_failures_total: int = 0
    late_pages_total: int = 0  # came from storage after their request had gone on without them
    ages: tuple[AgeStats, ...] = ()
    prefill_rate: float = 0.0  # tokens a second, as the cost model has it; 0: not measured
    has_storage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStats:
    """How steps of several ranks read each other's pages.

    `steps_total`: (way of the cached part, way of the chunk's own, steps). `rates`: what they were
    chosen by; None where the way is prescribed.
    """

    steps_total: tuple[tuple[str, str, int], ...] = ()
    rates: LinkRates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The loop and the scheduler. Counters (`*_total`) only grow."""

    running: int
    queued: int
    cache: CacheStats
    steps_total: int = 0
    prompt_tokens_total: int = 0  # of requests at first admission
    cached_tokens_total: CachedTokens = field(default_factory=CachedTokens)
    computed_tokens_total: int = 0  # of the prompts; with the cached ones they are all of them
    generated_tokens_total: int = 0
    recomputed_tokens_total: int = 0  # computed again after a retraction; never counted as hits
    retractions_total: int = 0
    restarts_total: int = 0  # requests that began lower down, for window state that was gone
    restarted_tokens_total: int = 0  # computed by them although their other state was cached
    refused_total: int = 0
    finished_total: tuple[tuple[str, int], ...] = ()  # (FinishReason.value, count)
    compute_s_total: float = 0.0  # time spent inside steps
    tiers: TierStats | None = None  # None: the device only
    remote: RemoteStats | None = None  # None: all pages have one owner
