"""`phloem bench tiers`: what moving pages costs, and whether it is worth it.

host_copy_over_memcpy            speed of device <-> host copies, of a plain memcpy's
store_over_raw_*, _file_per_page the segment store against raw O_DIRECT and one file per page
overlap_over_larger              a step under a load as slow as itself, over either alone
host_hit_over_device_hit_ttft    4,096 cached tokens on the host against on the device
storage_hit_over_cold_ttft       4,096 cached tokens in storage against computed
worst_tier_over_best_bound       the engine's choice against the better of load and recompute:
                                 95 % bound of the median, the worst tier and length
aa_control                       the same bound of a tier against itself
"""

from __future__ import annotations

from typing import Any

from phloem.bench import stores
from phloem.bench.tier_copy import measure_copies, measure_overlap
from phloem.bench.tier_ttft import TtftOptions, measure_ttft

__all__ = ["run"]

_QUICK = TtftOptions(cached=512, lengths=(256, 512), pairs=5, cold_samples=1)
_FROM_STORES = (
    "store_over_raw_64k",
    "store_over_raw_256k",
    "store_over_raw_1m",
    "store_over_file_per_page",
)


def run(quick: bool = False) -> dict[str, Any]:
    """Measure; several minutes (quick: one or two), up to 5 GB of disk in the current directory."""
    results = measure_copies(9 if quick else 31)
    results += [r for r in stores.run(quick)["results"] if r["name"] in _FROM_STORES]
    results += measure_overlap(5 if quick else 15)
    results += measure_ttft(_QUICK if quick else TtftOptions())
    return {"bench": "tiers", "results": results}
