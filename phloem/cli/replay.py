"""`phloem replay TRACE...`: request traces through the real loop, scheduler and cache."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from phloem.cache import WindowConfig
from phloem.cli.screen import progress_bar
from phloem.config import CacheOptions, Config, ModelOptions, SchedulerOptions
from phloem.config.flags import FlagParser, add_settings, build_settings, given_settings
from phloem.config.setting import setting, validate
from phloem.core.errors import ConfigError
from phloem.core.request import OutputChunk
from phloem.kv.sizing import default_checkpoint, pages_for_tokens
from phloem.loop import EngineLoop
from phloem.sim import (
    Ranks,
    ReplayReport,
    ReplayTarget,
    TraceError,
    TraceRequest,
    pages_of,
    read_trace,
    replay,
    simulated_target,
)

__all__ = ["ReplayOptions", "run"]

# Figures of a report, and how the table calls them (it must fit in 80 columns).
FIELDS = {
    "requests": "requests",
    "refused": "refused",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "hit_rate": "hit rate",
    "evicted_pages": "evicted",
}
# With a host tier; the last: pages that a cache would move that copies prompts and hits whole.
TIER_FIELDS = {
    "host_tokens": "from host",
    "written_pages": "written",
    "loaded_pages": "loaded",
    "full_copy_pages": "full copy",
}
# With sliding-window layers.
WINDOW_FIELDS = {"window_evicted_pages": "windows out", "restarts": "restarts"}
_ALL_FIELDS = FIELDS | TIER_FIELDS | WINDOW_FIELDS

_EPILOG = """\
A trace is a file of JSON lines with input_length, output_length, hash_ids and timestamp (ms): equal
hash ids are equal runs of --tokens-per-id tokens. No model is needed unless --model names one.

examples:
  phloem replay conversation.jsonl                 with room for everything
  phloem replay *.jsonl --pages 4096 --policy lpm
  phloem replay conversation.jsonl --json | tail -1
  phloem replay conversation.jsonl --window 1024 --window-pages 2048
  phloem replay conversation.jsonl --cp 4 --pages 1024 --placement replicate
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How the traces are played."""

    pages: int | None = setting(
        None,
        "pages of the pool, of each rank's with --cp; default: room for the whole trace",
        low=1,
    )
    cp: int = setting(1, "ranks that share the simulated cache", low=1, high=64)
    placement: Literal["striped", "contiguous", "replicate"] = setting(
        "striped", "which rank holds which page; replicate: each holds all of them"
    )
    host_pages: int = setting(0, "pages of the host tier behind the pool", low=0)
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = setting(
        "write_through",
        "which pages are copied to the host",
        spellings={
            "write-through": "write_through",
            "write-through-selective": "write_through_selective",
            "write-back": "write_back",
        },
    )
    window: int | None = setting(
        None, "tokens of a sliding window that some layers have, the token itself included", low=1
    )
    window_layers: int = setting(24, "layers with that window: how far a restart goes back", low=1)
    window_pages: int | None = setting(
        None,
        "pages of their pool, of each rank's with --cp; default: as many as of the other",
        low=1,
    )
    window_checkpoint: int | None = setting(
        None, "tokens between kept tails; 0: ends only; default: 8 windows, least 2048", low=0
    )
    policy: Literal["lpm", "fcfs", "hrrn", "routing_key"] = setting(
        "lpm", "order of the queue", spellings={"routing-key": "routing_key"}
    )
    page_size: int = setting(16, "tokens a page", low=1, high=1024)
    tokens_per_id: int = setting(16, "tokens that one hash id stands for", low=1, high=4096)
    timed: bool = setting(False, "let requests arrive at their times instead of one after another")
    limit: int | None = setting(None, "play the first N requests of each trace only", low=1)
    model: str | None = setting(None, "play through the real engine with this model")

    def __post_init__(self) -> None:
        validate(self)


def run(argv: Sequence[str]) -> int:
    """Replay each trace and print what was cached."""
    parser = FlagParser(
        prog="phloem replay",
        usage="phloem replay TRACE [TRACE ...] [flags]",
        description="Run request traces through the real scheduler and cache.",
        epilog=_EPILOG,
    )
    parser.add_argument("traces", metavar="TRACE", nargs="+", help="trace file (JSON lines)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document as the last line"
    )
    add_settings(parser, ReplayOptions, title="replay")
    args = parser.parse_args(argv)
    options = build_settings(ReplayOptions, given_settings(args))
    _check(options)
    paths = [Path(name) for name in args.traces]
    if len(set(paths)) < len(paths):
        raise ConfigError("a trace is named twice")
    traces = {path: _read(path, options) for path in paths}
    reports = {str(path): _play(path, trace, options) for path, trace in traces.items()}
    Console(stderr=args.json, highlight=False).print(_table(reports))
    if args.json:
        print(json.dumps(_document(reports)), flush=True)
    return 0


def _check(options: ReplayOptions) -> None:
    """Raise ConfigError if settings contradict each other."""
    if options.model is not None and options.host_pages:
        raise ConfigError("--host-pages sizes the simulated host tier: leave it out with --model")
    if options.model is not None and options.cp > 1:
        raise ConfigError("--cp is of a simulated cache: leave it out with --model")
    if options.model is not None and options.window is not None:
        raise ConfigError("--window is of a simulated model: leave it out with --model")
    if options.window is None and options.window_pages is not None:
        raise ConfigError("--window-pages needs --window: which layers keep how many tokens")
    if options.host_pages and options.pages is None:
        raise ConfigError("--host-pages is of use behind a limited pool: give --pages as well")


def _read(path: Path, options: ReplayOptions) -> list[TraceRequest]:
    lines = read_trace(path, tokens_per_id=options.tokens_per_id)
    try:
        trace = list(itertools.islice(lines, options.limit))
    except TraceError as error:
        raise ConfigError(str(error)) from None
    if not trace:
        raise ConfigError(f"{path}: holds no request")
    return trace


def _play(path: Path, trace: list[TraceRequest], options: ReplayOptions) -> ReplayReport:
    with progress_bar() as bar:
        task = bar.add_task(path.name, total=len(trace))

        def on_progress(done: int, _total: int) -> None:
            bar.update(task, completed=done)

        if options.model is not None:
            return _play_real(trace, options, on_progress)
        return replay(
            trace,
            page_size=options.page_size,
            target=_simulated(trace, options),
            timed=options.timed,
            on_progress=on_progress,
        )


def _simulated(trace: list[TraceRequest], options: ReplayOptions) -> ReplayTarget:
    size = options.page_size
    num_pages = options.pages or pages_of(trace, max_tokens=1, page_size=size)
    window = None
    if options.window is not None:
        checkpoint = options.window_checkpoint
        if checkpoint is None:
            checkpoint = default_checkpoint(options.window)
        window = WindowConfig(
            tokens=options.window,
            layers=options.window_layers,
            pages=(options.window_pages or num_pages,),
            checkpoint=pages_for_tokens(checkpoint, size),
        )
    return simulated_target(
        num_pages=num_pages,
        ranks=Ranks(count=options.cp, placement=options.placement),
        policy=options.policy,
        page_size=size,
        host_pages=options.host_pages,
        write_policy=options.write_policy,
        window=window,
    )


class _Hooks:
    """A core's hooks: output goes to the replay once there is one; nobody watches the rest."""

    def __init__(self) -> None:
        self.take: Callable[[Sequence[OutputChunk]], None] = lambda _: None

    def emit(self, chunks: list[OutputChunk]) -> None:
        self.take(chunks)

    def wake(self) -> None:
        """The next pass looks."""

    def on_layer(self) -> None:
        """Nobody watches a heartbeat here."""

    def on_wait(self) -> None:
        """Nobody else has anything to say here."""

    def on_load(self, done: int, total: int, phase: str) -> None:
        """The bar counts requests."""


def _play_real(
    trace: list[TraceRequest], options: ReplayOptions, on_progress: Callable[[int, int], None]
) -> ReplayReport:
    """The same requests through a real model in this process, loaded anew for each trace."""
    # Imported late: the simulated replay needs no torch.
    from phloem.engine.build import build_core

    assert options.model is not None, "the caller has looked"
    config = Config(
        model=ModelOptions(model=options.model),
        cache=CacheOptions(page_size=options.page_size, num_pages=options.pages),
        scheduler=SchedulerOptions(schedule_policy=options.policy),
    )
    hooks = _Hooks()
    core = build_core(config, hooks, ())

    def make_loop(take: Callable[[Sequence[OutputChunk]], None]) -> EngineLoop:
        hooks.take = take
        return core.loop

    try:
        target = ReplayTarget(make_loop=make_loop, vocab_size=core.facts.card.vocab_size)
        return replay(trace, timed=options.timed, target=target, on_progress=on_progress)
    finally:
        core.close()


def _table(reports: dict[str, ReplayReport]) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("trace", overflow="fold")
    labels = {**FIELDS} | (TIER_FIELDS if any(r.written_pages for r in reports.values()) else {})
    if any(report.restarts for report in reports.values()):
        labels |= {"restarts": WINDOW_FIELDS["restarts"]}
    if not any(report.refused for report in reports.values()):
        del labels["refused"]
    for label in labels.values():
        table.add_column(label, justify="right", no_wrap=True)
    for path, report in reports.items():
        table.add_row(Path(path).name, *_cells(_fields(report), labels))
    if len(reports) > 1:
        table.add_section()
        table.add_row("all", *_cells(_total(reports), labels))
    return table


def _cells(figures: Mapping[str, float], names: Iterable[str]) -> list[str]:
    return [_cell(figures[name]) for name in names]


def _cell(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2%}"


def _document(reports: dict[str, ReplayReport]) -> dict[str, Any]:
    """The sums of all traces, and each trace's own figures."""
    traces = [{"trace": path, **_fields(report)} for path, report in reports.items()]
    return {**_total(reports), "traces": traces}


def _fields(report: ReplayReport) -> dict[str, int | float]:
    return {name: getattr(report, name) for name in _ALL_FIELDS}


def _total(reports: dict[str, ReplayReport]) -> dict[str, int | float]:
    sums = {name: sum(getattr(r, name) for r in reports.values()) for name in _ALL_FIELDS}
    sums["hit_rate"] = sums["cached_tokens"] / max(sums["prompt_tokens"], 1)
    return sums
