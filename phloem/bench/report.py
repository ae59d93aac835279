"""How every bench reports: a table on stderr for people, one JSON document as the last stdout line.

{"bench": NAME, "machine": {...}, "results": [{"name", "value", "unit", "samples"?}, ...]}

Names are stable: whoever compares two runs compares by name. A ratio carries both sides' samples.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

__all__ = [
    "Result",
    "document_of",
    "format_value",
    "machine_info",
    "paired_ratio",
    "percentile",
    "print_report",
    "results_from",
    "summary",
]

_VERSIONS = ("phloem", "torch", "numpy", "tokenizers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One figure. `samples`: what it was made from; `spread`: 10th and 90th percentile of it."""

    name: str
    value: float | None  # None: could not be measured (the server did not report it)
    unit: str
    samples: Any = None
    spread: tuple[float, float] | None = None

    def as_json(self) -> dict[str, Any]:
        """The document's form; parts that are absent are left out."""
        out: dict[str, Any] = {"name": self.name, "value": _finite(self.value), "unit": self.unit}
        if self.samples is not None:
            out["samples"] = self.samples
        if self.spread is not None:
            out["spread"] = list(self.spread)
        return out


def percentile(samples: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile; NaN of nothing."""
    if not samples:
        return math.nan
    ordered = sorted(samples)
    rank = math.ceil(percent / 100 * len(ordered))
    return ordered[min(max(rank, 1), len(ordered)) - 1]


def summary(name: str, samples: Sequence[float], unit: str) -> Result:
    """The median of `samples`, with all of them."""
    return Result(
        name=name,
        value=statistics.median(samples) if samples else None,
        unit=unit,
        samples=[round(x, 9) for x in samples],
        spread=_spread(samples),
    )


def paired_ratio(
    name: str, pairs: Sequence[tuple[float, float]], *, sides: tuple[str, str]
) -> Result:
    """The median of a/b over interleaved pairs (a, b), with the raw samples of both sides."""
    ratios = [a / b for a, b in pairs]
    return Result(
        name=name,
        value=statistics.median(ratios) if ratios else None,
        unit="ratio",
        samples={
            sides[0]: [round(a, 9) for a, _ in pairs],
            sides[1]: [round(b, 9) for _, b in pairs],
        },
        spread=_spread(ratios),
    )


def results_from(document: Mapping[str, Any]) -> list[Result]:
    """The results of a bench that answers with plain dictionaries."""
    return [
        Result(
            name=item["name"],
            value=item["value"],
            unit=item["unit"],
            samples=item.get("samples"),
            spread=_spread(item["samples"]) if _is_series(item.get("samples")) else None,
        )
        for item in document["results"]
    ]


def machine_info() -> dict[str, Any]:
    """What one must know to compare figures: processor, usable cores, memory, load, versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_bytes": _memory_bytes(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _VERSIONS},
    }


def print_report(
    bench: str,
    results: Iterable[Result],
    *,
    facts: Mapping[str, Any] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> None:
    """Print the table and then the document; `facts` are further top-level keys of it."""
    results = list(results)
    _print_table(bench, results, stderr or sys.stderr)
    document = document_of(bench, results, facts)
    print(json.dumps(document, allow_nan=False), file=stdout or sys.stdout, flush=True)


def document_of(
    bench: str, results: Iterable[Result], facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The document as a value; `facts` are further top-level keys of it."""
    return {
        "bench": bench,
        "machine": machine_info(),
        **(facts or {}),
        "results": [result.as_json() for result in results],
    }


def format_value(value: float | None) -> str:
    """Four significant digits, without an exponent where people can do without."""
    if value is None or not math.isfinite(value):
        return "n/a"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) < 1e-4:
        return f"{value:.4g}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def _print_table(bench: str, results: Sequence[Result], stream: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column(bench, overflow="fold")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("p10 ... p90", justify="right")
    for item in results:
        low_high = "" if item.spread is None else " ... ".join(map(format_value, item.spread))
        table.add_row(item.name, format_value(item.value), item.unit, low_high)
    Console(file=stream, highlight=False).print(table)


def _is_series(samples: Any) -> bool:
    return isinstance(samples, list) and all(isinstance(x, int | float) for x in samples)


def _spread(samples: Sequence[float]) -> tuple[float, float] | None:
    if len(samples) < 2:
        return None
    return percentile(samples, 10), percentile(samples, 90)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
