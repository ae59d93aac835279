"""What `/metrics` tells of how ranks read each other's pages."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from phloem.core.stats import RemoteStats

__all__ = ["of_remote"]


def of_remote(remote: RemoteStats) -> Iterator[Metric]:
    """Steps by their ways, and what was measured at the start."""
    steps = CounterMetricFamily(
        "phloem_remote_kv_steps",
        "Steps by how remote pages were read: those cached before the step, and its own",
        labels=("cached", "own"),
    )
    for cached, own, count in remote.steps_total:
        steps.add_metric((cached, own), count)
    yield steps
    rates = remote.rates
    if rates is None:
        return
    for name, text, value in (
        ("link_latency_seconds", "Of a message between ranks, at the start", rates.latency_s),
        ("link_bandwidth_bytes", "Bytes a second between ranks, at the start", rates.bytes_s),
        ("remote_read_bytes", "Bytes a second of remote pages in place; 0: not mapped",
         rates.read_bytes_s),
        ("layer_row_seconds", "A layer's products for one row, at the start", rates.linear_row_s),
        ("layer_pair_seconds", "Attention of a query over a key, at the start", rates.pair_s),
    ):  # fmt: skip
        yield GaugeMetricFamily(f"phloem_{name}", text, value=float(value))
