"""What `/metrics` tells of the tiers below the device."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from phloem.core.stats import AGE_BOUNDS_S, AgeStats, CacheStats, TierStats, TransferStats

__all__ = ["of_tiers"]


def of_tiers(cache: CacheStats, tiers: TierStats) -> Iterator[Metric]:
    """Residence, traffic, decisions and ages."""
    yield from _of_host(cache)
    yield from _of_transfers(tiers.transfers)
    yield from _of_decisions(tiers)
    yield from _of_ages(tiers.ages)


def _of_host(cache: CacheStats) -> Iterator[Metric]:
    yield _gauge("host_capacity_pages", "Pages of the host arena", cache.host_total_pages)
    pages = GaugeMetricFamily(
        "phloem_host_pages", "Pages of the host arena by state", labels=("state",)
    )
    free, cached = cache.host_free_pages, cache.host_pages
    pages.add_metric(("free",), free)
    pages.add_metric(("cached",), cached)
    pages.add_metric(("transferring",), max(0, cache.host_total_pages - free - cached))
    yield pages
    size = cache.page_size
    evicted = CounterMetricFamily(
        "phloem_tier_evicted_tokens", "Tokens that left a tier", labels=("tier", "to")
    )
    demoted, lost = cache.demoted_pages_total, cache.evicted_pages_total - cache.demoted_pages_total
    evicted.add_metric(("device", "host"), demoted * size)
    evicted.add_metric(("device", "nowhere"), lost * size)
    evicted.add_metric(("host", "nowhere"), cache.host_evicted_pages_total * size)
    yield evicted


def _of_transfers(ways: tuple[TransferStats, ...]) -> Iterator[Metric]:
    for name, text, field in (
        ("transfer_pages", "Pages that arrived", "pages_total"),
        ("transfer_bytes", "Bytes that arrived", "bytes_total"),
        ("transfer_seconds", "Time that transfers took", "seconds_total"),
        ("transfer_failed_pages", "Pages that did not arrive", "failed_pages_total"),
    ):
        family = CounterMetricFamily(f"phloem_{name}", text, labels=("way",))
        for way in ways:
            family.add_metric((way.kind,), float(getattr(way, field)))
        yield family
    in_flight = GaugeMetricFamily(
        "phloem_transfers_in_flight", "Transfers under way", labels=("way",)
    )
    bandwidth = GaugeMetricFamily(
        "phloem_transfer_bandwidth_bytes", "Bytes a second, as measured", labels=("way",)
    )
    for way in ways:
        in_flight.add_metric((way.kind,), way.in_flight)
        bandwidth.add_metric((way.kind,), way.bandwidth)
    yield in_flight
    yield bandwidth


def _of_decisions(tiers: TierStats) -> Iterator[Metric]:
    yield _gauge("queued_backups", "Paths that wait to be copied", tiers.queued_backups)
    yield _gauge("held_host_pages", "Host pages in quarantine", tiers.held_host_pages)
    yield _gauge("prefill_tokens_per_second", "As the cost model has it", tiers.prefill_rate)
    yield _gauge("storage_attached", "1: there is a storage tier", tiers.has_storage)
    dropped = CounterMetricFamily(
        "phloem_dropped_pages", "Pages that were not copied, by reason", labels=("reason",)
    )
    for reason, pages in tiers.dropped_pages_total:
        dropped.add_metric((reason,), pages)
    yield dropped
    choices = CounterMetricFamily(
        "phloem_load_choices", "Host hits by what the cost model chose", labels=("choice",)
    )
    for choice, requests in tiers.load_choices_total:
        choices.add_metric((choice,), requests)
    yield choices
    failures = tiers.load_failures_total
    yield CounterMetricFamily("phloem_load_failures", "Loads that failed", value=failures)
    late = tiers.late_pages_total
    yield CounterMetricFamily(
        "phloem_late_prefetch_pages",
        "Came from storage after their request had gone on",
        value=late,
    )


def _of_ages(ages: tuple[AgeStats, ...]) -> Iterator[Metric]:
    family = HistogramMetricFamily(
        "phloem_page_age_seconds",
        "Since the last use of a page, when it was hit or evicted",
        labels=("event", "tier"),
    )
    names = [*(f"{bound:g}" for bound in AGE_BOUNDS_S), "+Inf"]
    for age in ages:
        total = 0
        buckets: list[tuple[str, float]] = []
        for name, count in zip(names, age.counts, strict=True):
            total += count
            buckets.append((name, float(total)))
        family.add_metric((age.event, age.tier), buckets, age.sum_s)
    yield family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"phloem_{name}", text, value=float(value))
