"""`phloem bench compare`: Phloem beside other engines, in one interleaved run.

A pair of servers runs at a time: Phloem and one peer, with the same prompts, pool, threads and
numbers of tokens. Figures are ratios of medians over rounds A B A B.
"""

from __future__ import annotations

from phloem.bench.compare.markdown import render, saved_runs, write_report
from phloem.bench.compare.run import CompareOptions, run_compare

__all__ = ["CompareOptions", "render", "run_compare", "saved_runs", "write_report"]
