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

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from phloem.bench import stores
from phloem.bench.tier_copy import measure_copies, measure_overlap
from phloem.bench.tier_ttft import TtftOptions, measure_ttft
from phloem.core.errors import ConfigError

__all__ = ["PARTS", "parse_lengths", "run"]

PARTS = ("copies", "stores", "overlap", "ttft")
MOST_TOKENS = 8_000  # of the small model's 8,192
_QUICK = TtftOptions(cached=512, lengths=(256, 512), pairs=5, cold_samples=1)
_FROM_STORES = (
    "store_over_raw_64k",
    "store_over_raw_256k",
    "store_over_raw_1m",
    "store_over_file_per_page",
)


def parse_lengths(text: str) -> tuple[int, ...]:
    """ "256,1024": prefix lengths in tokens. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 32 <= int(word) <= MOST_TOKENS for word in words):
        raise ConfigError(f"lengths are tokens from 32 to {MOST_TOKENS}, got {text!r}")
    return tuple(int(word) for word in words)


def run(
    quick: bool = False,
    *,
    lengths: tuple[int, ...] | None = None,
    pairs: int | None = None,
    parts: Iterable[str] = PARTS,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure; several minutes (quick: one or two), up to 5 GB of disk in the current directory.

    `lengths` of the prefixes, `pairs` for each; `say` hears of every part as it ends.
    """
    options = _QUICK if quick else TtftOptions()
    options = replace(
        options,
        lengths=options.lengths if lengths is None else lengths,
        pairs=options.pairs if pairs is None else pairs,
    )
    measures: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "copies": lambda: measure_copies(9 if quick else 31),
        "stores": lambda: [r for r in stores.run(quick)["results"] if r["name"] in _FROM_STORES],
        "overlap": lambda: measure_overlap(5 if quick else 15),
        "ttft": lambda: measure_ttft(options, say),
    }
    results: list[dict[str, Any]] = []
    for part in PARTS:
        if part in parts:
            started_s = time.monotonic()
            results += measures[part]()
            say(f"{part}: {time.monotonic() - started_s:.0f} s")
    return {"bench": "tiers", "results": results}
