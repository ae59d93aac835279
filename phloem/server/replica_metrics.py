"""What `/metrics` tells of replicas of hot pages."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from phloem.core.stats import ReplicaStats

__all__ = ["of_replicas"]


def of_replicas(replicas: ReplicaStats, page_bytes: int) -> Iterator[Metric]:
    """How many there are, what they spare, and why they went."""
    yield GaugeMetricFamily(
        "phloem_replica_bytes",
        "Copies of pages on ranks that do not own them",
        value=float(replicas.pages * page_bytes),
    )
    yield GaugeMetricFamily(
        "phloem_replica_capacity_pages",
        "Pages that may hold such copies",
        value=float(replicas.most_pages),
    )
    yield CounterMetricFamily(
        "phloem_replica_made_pages",
        "Copies that were made",
        value=float(replicas.made_pages_total),
    )
    yield CounterMetricFamily(
        "phloem_replica_served_pages",
        "Pages that rows read in a step from such copies instead of from other ranks",
        value=float(replicas.served_pages_total),
    )
    dropped = CounterMetricFamily(
        "phloem_replica_dropped_pages", "Copies that ended, by reason", labels=("reason",)
    )
    for reason, count in replicas.dropped_pages_total:
        dropped.add_metric((reason,), float(count))
    yield dropped
