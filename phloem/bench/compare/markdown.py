"""The report for people: docs/benchmarks.md, rendered from the document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phloem.bench.report import Result, document_of, format_value
from phloem.core.errors import ConfigError

__all__ = ["render", "saved_runs", "write_report"]

# Name, what must hold (issue's bounds), and which way is better.
_TARGETS = {
    "prefill_512_over_vllm": ">= 1.8",
    "prefill_2048_over_vllm": ">= 1.8",
    "prefill_8000_over_vllm": ">= 2.5",
    "decode_b1_over_vllm": ">= 2",
    "decode_b8_over_vllm": ">= 2",
    "decode_b32_over_vllm": ">= 2",
    "decode_b1_q4_over_llama_cpp": ">= 2",
    "second_turn_ttft_over_best": "<= 0.5",
    "restart_ttft_over_recompute": "<= 0.25",
    "agent_trace_mean_ttft_over_best": "<= 0.5",
    "agent_trace_p99_ttft_over_best": "<= 1",
    "agent_trace_storage_mean_ttft_over_best": "<= 0.5",
    "agent_trace_storage_p99_ttft_over_best": "<= 1",
    "decode_bandwidth_fraction": ">= 0.7",
    "prefill_flops_fraction": "stretch: 0.6",
}

_HOW = """\
How it is measured: one pair of servers at a time, Phloem and one peer, over HTTP on the same
machine; the same prompts (seeded random token ids), the same pool, threads and answer lengths
(`ignore_eos`); rounds A B A B, medians, raw samples in the JSON document. A peer runs in the
precision that is faster on this machine (tried once; both tries are kept), Phloem in bf16, or on
the same Q4 blocks where the peer reads a GGUF file. "Over" is Phloem divided by the peer: of
tokens a second more is better, of times to first token (`ttft`) less.

- `--quick` measures the first six of the table only, with three rounds at 8,000 tokens.
- `prefill_N`: one cold prompt of N tokens. `decode_bN`: N answers at once behind 512 tokens each;
  `_busy_core`: while another process computes on one core.
- `second_turn_ttft_N`: N cached tokens and 32 new ones.
- `restart_ttft`: 4,096 tokens answered before a restart and 32 new ones, with `--storage`; the
  peer computes a prompt that it has not seen (it keeps nothing over a restart either).
- `agent_trace`: sessions of a coding agent with 4 clients, the pool holding a third of the
  distinct tokens. Phloem with the pool alone, except beside llama.cpp, which keeps idle prompts in
  8 GiB of RAM by itself. `storage`: Phloem with the same memory, of which a part (as much as the
  longest prompt leaves, a third at most) is the stage to a directory on disk; no peer has such a
  tier on a CPU. `host_tier`: Phloem with 1 GB behind the pool.
- `peak_rss`: peak resident memory of the server's processes, summed, after prefill and decode.
- `_over_best`: against the peer that Phloem does worst against, of all runs.

`phloem bench profile` takes Phloem's decode steps apart, scheduler and IPC included, and writes a
trace for chrome://tracing or Perfetto.
"""


def write_report(
    stem: str,
    results: Sequence[Result],
    facts: Mapping[str, Any],
    *,
    command: str,
    beside: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write STEM.json and STEM.md, `beside` the runs of other commands."""
    run = document_of("compare", results, {**facts, "command": command})
    kept = [other for other in beside if other["command"] != command]
    document = {"bench": "compare", "runs": [*kept, run]}
    Path(stem + ".json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    Path(stem + ".md").write_text(render(document, Path(stem).name))


def saved_runs(stem: str) -> list[dict[str, Any]]:
    """What `write_report` has written there, if anything. Raises ConfigError for other files."""
    path = Path(stem + ".json")
    if not path.exists():
        return []
    try:
        document = json.loads(path.read_text())
        render(document, path.stem)  # what lacks something would fail there after the whole run
        runs: list[dict[str, Any]] = document["runs"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(
            f"--add: {path} is no document of this command; leave --add out"
        ) from None
    return runs


def render(document: Mapping[str, Any], name: str) -> str:
    """The whole page of a document {"runs": [...]}, the oldest first, that lies in `name`.json."""
    runs = document["runs"]
    lines = [
        "# Benchmarks",
        "",
        f"Written by the commands below; the document: [{name}.json]({name}.json).",
        "",
        *_ratio_table(runs),
        *_missing(runs),
        *(line for number, run in enumerate(runs, 1) for line in _run(number, run)),
        "## How",
        "",
        _HOW,
    ]
    return "\n".join(lines).rstrip() + "\n"


def _run(number: int, run: Mapping[str, Any]) -> list[str]:
    """One run's own section. Its `note` stands above its figures."""
    machine = run["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v)
    return [
        f"## Run {number}",
        "",
        "```",
        run["command"],
        "```",
        "",
        *([f"**{run['note']}**", ""] if run.get("note") else []),
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB; "
        f"load average at the end {machine['load_average']}; {versions}. "
        f"Model {run['model']}, threads: {run['threads']}, rounds: {run['rounds']}.",
        "",
        *_all(run),
        "",
        *_commands(run),
    ]


def _ratio_table(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each figure as the last run that has measured it found it; beside the best peer, the worst of
    all runs: they differ in peers or in size."""
    rows = ["| figure | value | rounds p10 ... p90 | wanted | run |", "|---|---|---|---|---|"]
    for name, wanted in _TARGETS.items():
        number, result = _standing(runs, name)
        value = "not measured" if result is None else format_value(result["value"])
        rows.append(f"| `{name}` | {value} | {_spread(result)} | {wanted} | {number} |")
    return [*rows, ""]


def _standing(runs: Sequence[Mapping[str, Any]], name: str) -> tuple[int | str, Any]:
    """Number of the run and the figure that stand for `name`; ("", None) if there is none."""
    found: list[tuple[int | str, Any]] = [
        (number, result)
        for number, run in enumerate(runs, 1)
        for result in run["results"]
        if result["name"] == name and result["value"] is not None
    ]
    if not found:
        return "", None
    if name.endswith("_over_best"):  # of times, more is worse
        return max(found, key=lambda entry: entry[1]["value"])
    return found[-1]


def _missing(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What no run has measured, and what failed in one."""
    reasons = [
        f"{what}: {why}"
        for part in ("peers_not_run", "left_out")
        for what, why in runs[-1][part].items()
        if all(what in run[part] for run in runs)
    ]
    reasons += [
        f"{peer['peer']}, {what}: {why}"
        for run in runs
        for peer in run["peers"]
        for what, why in peer["failed"].items()
    ]
    if not reasons:
        return []
    return ["Not measured, and why:", "", *(f"- {reason}" for reason in reasons), ""]


def _all(document: Mapping[str, Any]) -> list[str]:
    rows = ["| name | value | unit | p10 ... p90 |", "|---|---|---|---|"]
    for result in document["results"]:
        value = format_value(result["value"])
        rows.append(f"| {result['name']} | {value} | {result['unit']} | {_spread(result)} |")
    return rows


def _commands(document: Mapping[str, Any]) -> list[str]:
    out = []
    for peer in document["peers"]:
        out += [f"Beside {peer['peer']} ({peer['version']}, {peer['dtype']}):", "", "```"]
        out += [f"# {role}\n{line}" for role, line in peer["commands"].items()]
        out += ["```", ""]
    return out


def _spread(result: Mapping[str, Any] | None) -> str:
    if result is None or "spread" not in result:
        return ""
    return " ... ".join(map(format_value, result["spread"]))
