"""`phloem bench serve | prefix | compare`, and the benches that need no server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from phloem.bench.client import Answer, Client
from phloem.bench.compare import CompareOptions, run_compare, saved_runs, write_report
from phloem.bench.local_server import local_server
from phloem.bench.prefix import PrefixOptions, num_steps, run_prefix
from phloem.bench.profile import ProfileOptions, run_profile
from phloem.bench.report import Result, print_report, results_from
from phloem.bench.serve import (
    MAX_SHOWN_ERRORS,
    LoadOptions,
    LoadReport,
    TargetOptions,
    num_requests,
    run_load,
)
from phloem.cli.screen import progress_bar
from phloem.config.flags import FlagParser, add_settings, build_settings, given_settings
from phloem.config.setting import did_you_mean
from phloem.core.errors import ConfigError

__all__ = ["run"]

# Benches that need no server: `phloem.bench.NAME.run(quick=...)`.
MICRO = ("tree", "sched", "stores", "kernels", "window")

_HELP = """\
usage: phloem bench WHAT [flags]

  serve    load any OpenAI-compatible server: latency, throughput, hit rate of this run
  prefix   what a cached prefix is worth: second turn against cold, and the throughput baseline
  compare  Phloem beside vLLM, llama.cpp and transformers on this machine (an hour; --quick: less)
  profile  where a decode step's time goes, as a table and a trace file
  tree     the prefix tree alone
  sched    a scheduler step alone
  stores   the segment store against raw I/O and one file per page
  kernels  the native kernels against PyTorch's
  tiers    copies, storage, overlap, and time to first token by tier (minutes; --quick: less)
  window   sliding windows: memory, hits, bytes copied, decode time (minutes; --quick: less)
  cp       several ranks with one cache: what fits, hits, time, the log (minutes; --quick: less)

Every bench prints a table (stderr) and, as the last line of stdout, one JSON document.

examples:
  phloem bench serve --workload shared-prefix --clients 8 --requests 200
  phloem bench serve --url http://127.0.0.1:9000 --workload multi-turn --rate 2.5
  phloem bench serve --workload trace --trace conversation.jsonl --prompts tokens
  phloem bench prefix --model smollm2 --serve-flags "--dtype bf16"
  phloem bench compare --quick
  phloem bench compare --against llama.cpp,http://127.0.0.1:9000
  phloem bench tree --quick | tail -1 | python3 -m json.tool
"""


def run(argv: Sequence[str]) -> int:
    """Run one bench and print its report."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0 if argv else 2
    benches: dict[str, Callable[[Sequence[str]], int]] = {
        "serve": _serve,
        "prefix": _prefix,
        "compare": _compare,
        "profile": _profile,
        "tiers": _tiers,
        "cp": _cp,
        **{name: functools.partial(_micro, name) for name in MICRO},
    }
    if argv[0] not in benches:
        near = did_you_mean(argv[0], benches)
        raise ConfigError(f"there is no bench {argv[0]!r}{near} ({', '.join(benches)})")
    return benches[argv[0]](argv[1:])


def _micro(name: str, argv: Sequence[str]) -> int:
    """A bench that needs no server: `phloem.bench.NAME.run`."""
    parser = FlagParser(prog=f"phloem bench {name}")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    args = parser.parse_args(argv)
    module = importlib.import_module(f"phloem.bench.{name}")
    document: dict[str, Any] = module.run(quick=args.quick)
    print_report(document["bench"], results_from(document))
    return 0


def _tiers(argv: Sequence[str]) -> int:
    bench = importlib.import_module("phloem.bench.tiers")
    parser = FlagParser(
        prog="phloem bench tiers",
        usage="phloem bench tiers [--quick] [--parts PARTS] [--lengths TOKENS] [--pairs N]",
        description="Copies, storage, overlap, and time to first token by tier.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--parts", default=",".join(bench.PARTS), help="default: %(default)s")
    parser.add_argument("--lengths", default=None, help="ttft: prefixes, as 256,1024,4096,8000")
    parser.add_argument("--pairs", type=int, default=None, help="ttft: of each (default: 30)")
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if unknown := set(parts) - set(bench.PARTS):
        raise ConfigError(f"there is no part {min(unknown)!r} ({', '.join(bench.PARTS)})")
    if args.pairs is not None and args.pairs < 1:
        raise ConfigError(f"--pairs must be at least 1, got {args.pairs}")
    lengths = None if args.lengths is None else bench.parse_lengths(args.lengths)
    document: dict[str, Any] = bench.run(
        args.quick,
        lengths=lengths,
        pairs=args.pairs,
        parts=parts,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print_report(document["bench"], results_from(document))
    return 0


def _cp(argv: Sequence[str]) -> int:
    bench = importlib.import_module("phloem.bench.cp")
    parser = FlagParser(
        prog="phloem bench cp",
        usage="phloem bench cp [--quick] [--parts PARTS]",
        description="Several ranks that share one cache: what fits, how often it hits, what "
        "dividing the pages costs in time, and what the log costs.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples, shorter prompts")
    parser.add_argument("--parts", default=",".join(bench.PARTS), help="default: %(default)s")
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if unknown := set(parts) - set(bench.PARTS):
        raise ConfigError(f"there is no part {min(unknown)!r} ({', '.join(bench.PARTS)})")
    document: dict[str, Any] = bench.run(args.quick, parts=parts)
    print_report(document["bench"], results_from(document))
    return 0


def _compare(argv: Sequence[str]) -> int:
    parser = FlagParser(
        prog="phloem bench compare",
        usage="phloem bench compare [--against PEERS] [--quick] [flags]",
        description="Measure Phloem and other engines in turn. Peers are installed once, each into "
        "an environment of its own.",
    )
    add_settings(parser, CompareOptions, title="comparison")
    options = build_settings(CompareOptions, given_settings(parser.parse_args(argv)))

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    beside = saved_runs(options.save) if options.add and options.save is not None else []
    # Servers run in sessions of their own: ended by SIGTERM, we still have to stop them.
    signal.signal(signal.SIGTERM, _interrupted)
    results, facts = asyncio.run(run_compare(options, say))
    print_report("compare", results, facts=facts)
    if options.save is not None:
        command = shlex.join(_without_note(argv))
        write_report(options.save, results, facts, command=command, beside=beside)
    return 0 if facts["peers"] else 1


def _without_note(argv: Sequence[str]) -> list[str]:
    """The command line to run again: the note was about the one run."""
    words, kept = iter(argv), ["phloem", "bench", "compare"]
    for word in words:
        if word == "--note":
            next(words, None)
        elif not word.startswith("--note="):
            kept.append(word)
    return kept


def _interrupted(signum: int, _: object) -> NoReturn:
    raise SystemExit(128 + signum)


def _profile(argv: Sequence[str]) -> int:
    parser = FlagParser(
        prog="phloem bench profile",
        usage="phloem bench profile [flags]",
        description="Time the parts of decode steps, in the engine process and in the front.",
    )
    add_settings(parser, ProfileOptions, title="profile")
    options = build_settings(ProfileOptions, given_settings(parser.parse_args(argv)))
    results, facts = run_profile(options)
    print_report("profile", results, facts=facts)
    print(f"trace: {options.out} (open it in chrome://tracing or Perfetto)", file=sys.stderr)
    return 0


def _serve(argv: Sequence[str]) -> int:
    parser = FlagParser(
        prog="phloem bench serve",
        usage="phloem bench serve [flags]",
        description="Load a server with a seeded workload, in a closed or an open loop.",
    )
    add_settings(parser, TargetOptions, title="target")
    add_settings(parser, LoadOptions, title="load")
    given = given_settings(parser.parse_args(argv))
    target = build_settings(TargetOptions, given)
    options = build_settings(LoadOptions, given)
    report, model = asyncio.run(_load(target, options))
    _print_errors(report)
    print_report(
        "serve",
        report.results(),
        facts={"target": {"url": target.url, "model": model}, "load": _facts(options)},
    )
    return 0 if report.good else 1


async def _load(target: TargetOptions, options: LoadOptions) -> tuple[LoadReport, str]:
    async with Client(target.url, api_key=target.api_key) as client:
        model = target.model or await client.first_model()
        with progress_bar() as bar:
            task = bar.add_task(options.workload, total=num_requests(options))

            def on_answer(_: Answer) -> None:
                bar.advance(task)

            return await run_load(client, model, options, on_answer=on_answer), model


def _facts(options: Any) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


def _print_errors(report: LoadReport) -> None:
    for line in report.errors[:MAX_SHOWN_ERRORS]:
        print(f"request failed: {line}", file=sys.stderr)
    if len(report.errors) > MAX_SHOWN_ERRORS:
        print(f"... and {len(report.errors) - MAX_SHOWN_ERRORS} more", file=sys.stderr)


def _prefix(argv: Sequence[str]) -> int:
    parser = FlagParser(
        prog="phloem bench prefix",
        usage="phloem bench prefix [--url URL | --model MODEL --serve-flags '...'] [flags]",
        description="Time a second turn on a cached prefix against a cold prompt of equal length.",
    )
    target = parser.add_argument_group("target", "A running server, or one of our own.")
    target.add_argument("--url", help="a running server (default: start one)")
    target.add_argument(
        "--model", default=None, help="model to start, or its name at --url (default: smollm2)"
    )
    target.add_argument("--api-key", default=None, help="bearer token to send to --url")
    target.add_argument(
        "--serve-flags", default="", help="flags of the server to start, in one argument"
    )
    add_settings(parser, PrefixOptions, title="sizes")
    args = parser.parse_args(argv)
    options = build_settings(PrefixOptions, given_settings(args))
    with _target_url(args.url, args.model, args.serve_flags) as url:
        results = asyncio.run(_measure_prefix(url, args, options))
    print_report("prefix", results, facts={"sizes": _facts(options), "flags": args.serve_flags})
    return 0


@contextlib.contextmanager
def _target_url(url: str | None, model: str | None, serve_flags: str) -> Iterator[str]:
    if url is not None:
        if serve_flags:
            raise ConfigError("--serve-flags are for a server of our own; leave out --url")
        yield url
        return
    print("starting a server ...", file=sys.stderr)
    with local_server(model or "smollm2", serve_flags.split()) as own:
        yield own


async def _measure_prefix(url: str, args: Any, options: PrefixOptions) -> list[Result]:
    async with Client(url, api_key=args.api_key) as client:
        # A server of our own has one name; a foreign one may have several.
        asked = args.model if args.url is not None else None
        model = asked or await client.first_model()
        with progress_bar() as bar:
            task = bar.add_task("prefix", total=num_steps(options))

            def on_step(name: str) -> None:
                bar.update(task, description=name, advance=1)

            return await run_prefix(client, model, options, on_step=on_step)
