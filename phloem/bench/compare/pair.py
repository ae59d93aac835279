"""One pair: Phloem and a peer, both running, measured in turn."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from phloem.bench.client import Client
from phloem.bench.compare.agent_trace import AgentTrace, PartReport, play
from phloem.bench.compare.calibrate import Precision
from phloem.bench.compare.peer import Attached, Launch, Peer, PeerUnavailable, Say, ServerSpec
from phloem.bench.compare.peers.phloem_peer import PhloemServer
from phloem.bench.compare.process import running, tree_peak_rss
from phloem.bench.compare.rounds import Measure, Pairs, interleave
from phloem.bench.compare.settle import cpu_seconds, until_idle
from phloem.bench.compare.tasks import Probe, ServerFailed, Task
from phloem.bench.local_server import free_port

__all__ = ["HOST_MEMORY", "Measured", "PairPlan", "TraceRun", "measure_pair", "trace_players"]

HOST_MEMORY = "1GB"
LEAST_STAGE = 16 * 16  # tokens
RESTART_CACHED, RESTART_NEW = 4096, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """What to measure. `trace` None: no agent trace; `restart`: continue after a restart.

    `few_rounds`: tasks too long for `rounds` rounds in a quick run, and how many they get.
    """

    rounds: int
    few_rounds: Mapping[str, int]
    seed: str
    tasks: tuple[Task, ...]
    trace: AgentTrace | None = None
    restart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRun:
    """The trace on one server, part by part. `tier`: ours has one below its pool; None: the peer's
    run, or ours with the pool alone."""

    side: str
    tier: Literal["host_tier", "storage"] | None = None
    parts: tuple[PartReport, ...]


@dataclass(slots=True, kw_only=True)
class Measured:
    """What came of a pair, as far as it got; `failed` says why a figure is missing."""

    ours: str
    peer: Peer
    version: str
    precision: Precision
    pairs: dict[str, Pairs] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    traces: list[TraceRun] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)
    peak_rss: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


async def measure_pair(
    ours: PhloemServer, measured: Measured, spec: ServerSpec, plan: PairPlan, say: Say
) -> None:
    """Fill `measured`. A part that fails is noted there; nothing is raised for it."""
    peer = measured.peer
    say(f"starting {peer.name}")
    with _noting(measured, "speed"):
        async with _served(measured, peer.name, peer, spec, plan.seed) as theirs:
            with _noting(measured, "speed"):
                async with _served(measured, ours.name, ours, spec, plan.seed) as mine:
                    await _run_tasks(measured, plan, (mine, theirs), say)
            if plan.restart:
                with _noting(measured, "restart"):
                    await _run_restart(measured, ours, spec, (plan, theirs), say)
    if plan.trace is not None:
        with _noting(measured, "agent_trace"):
            await _run_trace(measured, ours, spec, plan, say)


@dataclass(frozen=True, slots=True)
class _Side:
    name: str
    probe: Probe
    pid: int | None  # None: a server that is not our child


@contextlib.asynccontextmanager
async def _served(
    measured: Measured, role: str, server: Peer | PhloemServer, spec: ServerSpec, seed: str
) -> AsyncIterator[_Side]:
    """Start a server for a while. `role` names it in the report."""
    port = free_port()
    # Phloem's own name says its precision; a peer has the one that was chosen for it.
    dtype = spec.dtype if isinstance(server, PhloemServer) else measured.precision.dtype
    launch: Launch | Attached = server.launch(replace(spec, dtype=dtype), port)
    measured.commands[role] = _portable(launch.shown(), port)
    with running(launch, port) as process:
        async with Client(process.url) as client:
            probe = Probe(client, await client.first_model(), seed)
            side = _Side(role, probe, process.pid)
            await side.probe.ask(side.probe.draw("warm-up", 64), 4)
            yield side
        if process.pid is not None:
            peak = tree_peak_rss(process.pid)
            measured.peak_rss[role] = max(peak, measured.peak_rss.get(role, 0))


def _portable(command: str, port: int) -> str:
    """A command line without what is only so on this machine."""
    root = f"{Path(__file__).parents[3]}/"
    for here, there in ((sys.executable, "python"), (root, ""), (str(Path.home()), "~")):
        command = command.replace(here, there)
    return command.replace(str(port), "PORT")


async def _run_tasks(
    measured: Measured, plan: PairPlan, sides: tuple[_Side, _Side], say: Say
) -> None:
    mine, theirs = sides
    for task in plan.tasks:
        say(f"{mine.name} and {theirs.name}: {task.name}")
        with _noting(measured, task.name):
            for side in sides:
                await task.prime(side.probe)
            rounds = min(plan.rounds, plan.few_rounds.get(task.name, plan.rounds))
            pairs = await interleave(
                rounds, _sampler(task, mine, sides), _sampler(task, theirs, sides)
            )
            measured.pairs[task.name] = pairs
            measured.units[task.name] = task.unit


def _sampler(task: Task, side: _Side, sides: tuple[_Side, _Side]) -> Measure:
    async def sample(round_no: int) -> float:
        await _settle(sides)
        return await task.sample(side.probe, round_no)

    return sample


async def _settle(sides: tuple[_Side, _Side]) -> None:
    """Until neither server works on what it was asked before."""
    await until_idle(lambda: cpu_seconds(side.pid for side in sides if side.pid is not None))


async def _run_restart(
    measured: Measured,
    ours: PhloemServer,
    spec: ServerSpec,
    rest: tuple[PairPlan, _Side],
    say: Say,
) -> None:
    """Chats are answered, the server restarts, the chats go on; the peer computes a new prompt.

    A prompt that the running peer has never seen stands for the peer after a restart: it keeps
    nothing either, and is spared its own warm-up.
    """
    plan, theirs = rest
    length = RESTART_CACHED + RESTART_NEW
    role = f"{ours.name} with storage"
    say(f"{role}: {plan.rounds} chats, a restart, and on")
    with tempfile.TemporaryDirectory(prefix=".bench-compare-", dir=Path.cwd()) as folder:
        stored = replace(spec, storage=Path(folder))
        async with _served(measured, role, ours, stored, plan.seed) as mine:
            for number in range(plan.rounds):
                chat = mine.probe.draw(f"restart:{number}", length)
                await mine.probe.ask(chat[:RESTART_CACHED], 1)
        async with _served(measured, role, ours, stored, plan.seed) as mine:

            async def go_on(number: int) -> float:
                await _settle((mine, theirs))
                chat = mine.probe.draw(f"restart:{number}", length)
                return (await mine.probe.ask(chat, 1)).ttft_s

            async def recompute(number: int) -> float:
                await _settle((mine, theirs))
                prompt = theirs.probe.draw(f"restart:cold:{number}", length)
                return (await theirs.probe.ask(prompt, 1)).ttft_s

            measured.pairs["restart"] = await interleave(plan.rounds, go_on, recompute)
            measured.units["restart"] = "s"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePlayer:
    """Who plays the trace, and with what."""

    server: Peer | PhloemServer
    spec: ServerSpec
    tier: Literal["host_tier", "storage"] | None = None

    @property
    def role(self) -> str:
        kind = "" if self.tier is None else f", {self.tier.replace('_', ' ')}"
        return f"{self.server.name} trace{kind}"


def trace_players(
    trace: AgentTrace, ours: PhloemServer, peer: Peer, spec: ServerSpec, folder: Path
) -> list[TracePlayer]:
    """Ours and the peer with a pool of a third of the trace; ours also with host memory behind it,
    and with storage, whose stage is a part of the third, as large as the longest prompt allows."""
    least = trace.longest_tokens + 64
    pool = min(max(trace.distinct_tokens // 3, least), spec.pool_tokens)
    small = replace(spec, pool_tokens=pool, sized=True, max_running=8)
    # A pool must hold the longest prompt that a server lets in.
    alone = replace(small, max_model_len=min(pool, spec.max_model_len))
    players = [
        TracePlayer(server=ours, spec=alone),
        TracePlayer(server=peer, spec=alone),
        TracePlayer(server=replace(ours, host_memory=HOST_MEMORY), spec=alone, tier="host_tier"),
    ]
    stage = min(pool // 3, pool - least)
    if stage >= LEAST_STAGE:
        staged = replace(small, max_model_len=least, storage=folder)
        server = replace(ours, stage_tokens=stage)
        players.append(TracePlayer(server=server, spec=staged, tier="storage"))
    return players


async def _run_trace(
    measured: Measured, ours: PhloemServer, spec: ServerSpec, plan: PairPlan, say: Say
) -> None:
    """All players, part by part in turn."""
    trace = plan.trace
    assert trace is not None, "called for a plan with a trace"
    async with contextlib.AsyncExitStack() as stack:
        where = tempfile.TemporaryDirectory(prefix=".bench-compare-", dir=Path.cwd())
        folder = Path(stack.enter_context(where))
        players = trace_players(trace, ours, measured.peer, spec, folder)
        sides = [
            await stack.enter_async_context(
                _served(measured, player.role, player.server, player.spec, plan.seed)
            )
            for player in players
        ]
        reports: list[list[PartReport]] = [[] for _ in sides]
        for number, part in enumerate(trace.parts):
            for side, done in zip(sides, reports, strict=True):
                say(f"{side.name}: part {number + 1} of {len(trace.parts)}")
                done.append(await play(side.probe, part))
        for player, done in zip(players, reports, strict=True):
            run = TraceRun(side=player.role, tier=player.tier, parts=tuple(done))
            measured.traces.append(run)


@contextlib.contextmanager
def _noting(measured: Measured, what: str) -> Iterator[None]:
    """A failure of a server ends this part only, and is reported."""
    try:
        yield
    except (PeerUnavailable, ServerFailed) as error:
        measured.failed[what] = str(error)
    except BaseExceptionGroup as group:
        failures, rest = group.split((PeerUnavailable, ServerFailed))
        if failures is None or rest is not None:
            raise
        measured.failed[what] = str(_first(failures))


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
