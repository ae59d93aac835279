"""What `/metrics` tells of sliding-window layers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from phloem.core.stats import EngineStats, WindowStats

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
