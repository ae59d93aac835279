"""`phloem bench cp`: what several ranks that share one cache gain and cost.

Names and sides: bench/cp_hits.py (what fits, how often it hits), cp_time.py (prefill and decode),
cp_control.py (the log), cp_gather.py (what travels), cp_ways.py (what choosing anew gains),
cp_replicas.py (copies of hot pages).
`cost_model_right`: the share of a grid of shapes, ranks and simulated links in which what the cost
model picks is the fastest way of reading remote pages. A leader that may read in place does so even
where another way promises a little more (cache/remote_choice.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from phloem.bench import cp_hits
from phloem.bench.cp_control import measure_control
from phloem.bench.cp_gather import measure_gather
from phloem.bench.cp_replicas import measure_replicas
from phloem.bench.cp_time import measure_time
from phloem.bench.cp_ways import measure_ways
from phloem.bench.report import Result
from phloem.sim.links import remote_grid, right_share

__all__ = ["PARTS", "run"]

PARTS = ("hits", "choice", "control", "gather", "ways", "replicas", "time")
NUM_LAYERS = 24


def run(quick: bool = False, parts: Iterable[str] = PARTS) -> dict[str, Any]:
    """Measure `parts`; about twenty-five minutes (quick: four)."""
    results: list[Result] = []
    for part in parts:
        if part == "hits":
            results += [
                Result(name=name, value=None if value is None else round(value, 4), unit="ratio")
                for name, value in cp_hits.figures().items()
            ]
        elif part == "choice":
            share = right_share(remote_grid(), NUM_LAYERS)
            results.append(Result(name="cost_model_right", value=round(share, 4), unit="ratio"))
        elif part == "control":
            results += measure_control()
        elif part == "gather":
            results += measure_gather(quick=quick)
        elif part == "ways":
            results += measure_ways(quick=quick)
        elif part == "replicas":
            results += measure_replicas(quick=quick)
        elif part == "time":
            results += measure_time(quick=quick)
        else:
            raise ValueError(f"no part {part!r}; there are {', '.join(PARTS)}")
    return {"bench": "cp", "results": [result.as_json() for result in results]}
