"""The report for people: docs/benchmarks.md, rendered from the document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phloem.bench.report import Result, document_of, format_value

__all__ = ["render", "write_report"]

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
  distinct tokens. Phloem without a host tier, except beside llama.cpp, which keeps idle prompts in
  8 GiB of RAM by itself; `host_tier`: Phloem with 1 GB behind the pool.
- `peak_rss`: peak resident memory of the server's processes, summed, after prefill and decode.
- `_over_best`: against the peer that Phloem does worst against.

`phloem bench profile` takes Phloem's decode steps apart, scheduler and IPC included, and writes a
trace for chrome://tracing or Perfetto.
"""


def write_report(
    stem: str, results: Sequence[Result], facts: Mapping[str, Any], *, command: str
) -> None:
    """Write STEM.json and STEM.md."""
    document = document_of("compare", results, {**facts, "command": command})
    Path(stem + ".json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    Path(stem + ".md").write_text(render(document))


def render(document: Mapping[str, Any]) -> str:
    """The whole page. The document's `note` stands above the table."""
    machine = document["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v)
    lines = [
        "# Benchmarks",
        "",
        "Written by this command; its document: [benchmarks.json](benchmarks.json).",
        "",
        "```",
        document["command"],
        "```",
        "",
        *([f"**{document['note']}**", ""] if document.get("note") else []),
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB; "
        f"load average at the end {machine['load_average']}; {versions}. "
        f"Model {document['model']}, threads: {document['threads']}, rounds: {document['rounds']}.",
        "",
        *_ratio_table(document),
        *_missing(document),
        "## All figures",
        "",
        *_all(document),
        "",
        "## How",
        "",
        _HOW,
        "## Command lines",
        "",
        *_commands(document),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _ratio_table(document: Mapping[str, Any]) -> list[str]:
    found = {result["name"]: result for result in document["results"]}
    rows = ["| figure | value | rounds p10 ... p90 | wanted |", "|---|---|---|---|"]
    for name, wanted in _TARGETS.items():
        result = found.get(name)
        value = "not measured" if result is None else format_value(result["value"])
        rows.append(f"| `{name}` | {value} | {_spread(result)} | {wanted} |")
    return [*rows, ""]


def _missing(document: Mapping[str, Any]) -> list[str]:
    reasons = [f"{peer}: {why}" for peer, why in document["peers_not_run"].items()]
    reasons += [f"{what}: {why}" for what, why in document["left_out"].items()]
    reasons += [
        f"{peer['peer']}, {what}: {why}"
        for peer in document["peers"]
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
