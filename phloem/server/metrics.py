"""`/metrics`: one series per fact, counters in tokens, from the engine's snapshot and our clock.

Everything here runs in the server's event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from phloem.core.errors import EngineDead
from phloem.core.stats import EngineStats
from phloem.engine.api import EngineClient
from phloem.server.remote_metrics import of_remote
from phloem.server.replica_metrics import of_replicas
from phloem.server.tier_metrics import of_tiers
from phloem.server.window_metrics import of_windows

__all__ = ["Histogram", "Metrics", "Timer"]

_TTFT_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160
)  # fmt: skip
_ITL_S = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1, 2.5, 5
)  # fmt: skip
_E2E_S = (
    0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960
)  # fmt: skip


class Histogram:
    """Cumulative buckets without locks: some 0.3 us an observation."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def family(self) -> HistogramMetricFamily:
        """The series that Prometheus reads."""
        total = 0
        buckets = []
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        for name, count in zip(names, self.counts, strict=True):
            total += count
            buckets.append((name, float(total)))
        return HistogramMetricFamily(self.name, self.text, buckets=buckets, sum_value=self.sum)


class Timer:
    """The three latencies of one request, as its client feels them."""

    __slots__ = ("_e2e", "_itl", "_last", "_start", "_ttft")

    def __init__(self, ttft: Histogram, itl: Histogram, e2e: Histogram) -> None:
        self._ttft, self._itl, self._e2e = ttft, itl, e2e
        self._start = time.monotonic()
        self._last = 0.0

    def tick(self, num_tokens: int) -> None:
        """`num_tokens` arrived together: the time since the last ones is shared among them."""
        if num_tokens == 0:
            return
        now = time.monotonic()
        if self._last == 0.0:
            self._ttft.observe(now - self._start)
        else:
            self._itl.observe((now - self._last) / num_tokens, num_tokens)
        self._last = now

    def finish(self) -> None:
        """The answer is complete."""
        self._e2e.observe(time.monotonic() - self._start)


class Metrics(Collector):
    """Collects for a private registry; other registries of the process stay as they are."""

    def __init__(self, engine: EngineClient, *, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._stats: EngineStats | None = None
        self._stats_at = 0.0
        self._ttft = Histogram(
            "phloem_time_to_first_token_seconds", "From request to first token", _TTFT_S
        )
        self._itl = Histogram(
            "phloem_inter_token_latency_seconds", "Between tokens of one answer", _ITL_S
        )
        self._e2e = Histogram(
            "phloem_request_duration_seconds", "From request to last token", _E2E_S
        )
        self._http: Counter[tuple[str, int]] = Counter()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def start_timer(self) -> Timer:
        """A request starts now."""
        return Timer(self._ttft, self._itl, self._e2e)

    def count_http(self, endpoint: str, status: int) -> None:
        """One HTTP request has been answered (499: its client left before)."""
        self._http[endpoint, status] += 1

    async def stats(self) -> EngineStats | None:
        """A fresh snapshot if the engine gives one in time, else the last one."""
        try:
            self._stats = await asyncio.wait_for(self._engine.stats(), self._timeout_s)
            self._stats_at = time.monotonic()
        except (TimeoutError, EngineDead):
            pass  # phloem_stats_age_seconds tells
        return self._stats

    async def render(self) -> bytes:
        """The text that `/metrics` answers."""
        await self.stats()
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        yield from self._of_server()
        if self._stats is not None:
            yield from _of_cache(self._stats)
            yield from _of_loop(self._stats)
            if self._stats.tiers is not None:
                yield from of_tiers(self._stats.cache, self._stats.tiers)
            if self._stats.remote is not None:
                yield from of_remote(self._stats.remote)
            if self._stats.cache.window is not None:
                yield from of_windows(self._stats, self._stats.cache.window)
            if self._stats.cache.replicas is not None:
                yield from of_replicas(self._stats.cache.replicas, self._engine.card.page_bytes)

    def _of_server(self) -> Iterator[Metric]:
        health, card = self._engine.health(), self._engine.card
        yield _gauge("engine_alive", "1: the engine makes progress or is idle", health.alive)
        yield _gauge("engine_ready", "1: requests are accepted", health.ready)
        yield _gauge(
            "seconds_since_progress", "Since the engine's last pass", health.since_progress_s
        )
        if self._stats is not None:
            age = time.monotonic() - self._stats_at
            yield _gauge("stats_age_seconds", "Age of the engine's counters below", age)
        info = GaugeMetricFamily(
            "phloem_model_info",
            "What is served",
            labels=("model", "architecture", "dtype", "device"),
        )
        info.add_metric((card.name, card.architecture, card.dtype, card.device), 1)
        yield info
        http = CounterMetricFamily(
            "phloem_http_requests", "Answered HTTP requests", labels=("endpoint", "status")
        )
        for (endpoint, status), count in sorted(self._http.items()):
            http.add_metric((endpoint, str(status)), count)
        yield http
        for histogram in (self._ttft, self._itl, self._e2e):
            yield histogram.family()


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"phloem_{name}", text, value=float(value))


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"phloem_{name}", text, value=float(value))


def _split(family: Metric, label_values: Iterable[tuple[str, float]]) -> Metric:
    assert isinstance(family, GaugeMetricFamily | CounterMetricFamily), type(family)
    for label, value in label_values:
        family.add_metric((label,), value)
    return family


def _of_cache(stats: EngineStats) -> Iterator[Metric]:
    cache = stats.cache
    yield _gauge("page_size_tokens", "Tokens of one page", cache.page_size)
    yield _gauge("cache_capacity_pages", "Pages of the device pool", cache.total_pages)
    pages = GaugeMetricFamily(
        "phloem_cache_pages", "Pages by state; they sum to the capacity", labels=("state",)
    )
    states: tuple[tuple[str, float], ...] = (
        ("used", cache.locked_pages),
        ("evictable", cache.evictable_pages),
        ("free", cache.free_pages),
    )
    if cache.replicas is not None:
        states += (("replica", cache.replicas.pages),)
    yield _split(pages, states)
    yield _gauge("cache_nodes", "Nodes of the prefix tree", cache.nodes)
    evicted = cache.evicted_pages_total * cache.page_size
    yield _counter("evicted_tokens", "Cached tokens given up for others", evicted)
    missed = cache.evicted_then_requested_pages_total * cache.page_size
    yield _counter("evicted_then_requested_tokens", "Evicted tokens asked for again", missed)


def _of_loop(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("requests_running", "Requests being computed", stats.running)
    yield _gauge("requests_queued", "Requests that wait", stats.queued)
    prompt = stats.prompt_tokens_total
    yield _counter("prompt_tokens", "Prompt tokens of admitted requests", prompt)
    cached = CounterMetricFamily(
        "phloem_cached_prompt_tokens", "Prompt tokens found cached", labels=("source",)
    )
    found = stats.cached_tokens_total
    sources = (
        ("device", found.device),
        ("remote", found.remote),
        ("host", found.host),
        ("storage", found.storage),
    )
    yield _split(cached, sources)
    by_source = CounterMetricFamily(
        "phloem_prompt_tokens_by_source",
        "Prompt tokens by where their KV came from; all of them once loads have ended",
        labels=("source",),
    )
    yield _split(by_source, (*sources, ("computed", stats.computed_tokens_total)))
    yield _counter("generated_tokens", "Sampled tokens", stats.generated_tokens_total)
    recomputed = stats.recomputed_tokens_total
    yield _counter("recomputed_tokens", "Computed again after a retraction", recomputed)
    yield _counter("retractions", "Running requests put back in the queue", stats.retractions_total)
    yield _counter("requests_refused", "Requests the engine refused", stats.refused_total)
    finished = CounterMetricFamily(
        "phloem_requests_finished", "Requests ended, by reason", labels=("reason",)
    )
    yield _split(finished, stats.finished_total)
    yield _counter("engine_steps", "Forward passes", stats.steps_total)
    yield _counter("engine_compute_seconds", "Time inside forward passes", stats.compute_s_total)
