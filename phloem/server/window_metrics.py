"""What `/metrics` tells of sliding-window layers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from phloem.core.stats import EngineStats, TierStats, WindowStats

__all__ = ["of_windows"]


def of_windows(stats: EngineStats, window: WindowStats) -> Iterator[Metric]:
    """Their pool, what was evicted from it alone, and what that cost."""
    pages = GaugeMetricFamily(
        "phloem_window_pages",
        "Pages of the window layers' pool by state",
        labels=("state",),
    )
    pages.add_metric(("used",), window.locked_pages)
    pages.add_metric(("evictable",), window.evictable_pages)
    pages.add_metric(("free",), window.free_pages)
    yield pages
    yield GaugeMetricFamily(
        "phloem_window_capacity_pages",
        "Pages of the window layers' pool",
        value=float(window.total_pages),
    )
    for name, text, value in (
        ("window_evicted_pages", "Window pages given up for others", window.evicted_pages_total),
        ("window_restarts", "Requests that began before their cached end", stats.restarts_total),
        (
            "window_restarted_tokens",
            "Tokens computed again only for their window state",
            stats.restarted_tokens_total,
        ),
    ):
        yield CounterMetricFamily(f"phloem_{name}", text, value=float(value))
    if stats.tiers is not None:
        yield from _of_tiers(stats.tiers, window)


def _of_tiers(tiers: TierStats, window: WindowStats) -> Iterator[Metric]:
    """Tails on the host, and what has moved of them."""
    pages = GaugeMetricFamily(
        "phloem_window_host_pages",
        "Pages of the host arena for windows by state",
        labels=("state",),
    )
    free, cached = window.host_free_pages, window.host_pages
    pages.add_metric(("free",), free)
    pages.add_metric(("cached",), cached)
    pages.add_metric(("transferring",), max(0, window.host_total_pages - free - cached))
    yield pages
    moved = CounterMetricFamily(
        "phloem_window_transfer_bytes", "Bytes of window state that arrived", labels=("way",)
    )
    for way in tiers.transfers:
        moved.add_metric((way.kind,), float(way.window_bytes_total))
    yield moved
    yield CounterMetricFamily(
        "phloem_window_host_evicted_pages",
        "Copies of window state that left the host",
        value=float(window.host_evicted_pages_total),
    )
