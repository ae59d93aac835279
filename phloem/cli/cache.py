"""`phloem cache stats | ls | decisions | remote | verify | clear | warm`: a server, a directory."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from phloem.cli.warm import read_prompts, warm_directory, warm_server
from phloem.config.flags import FlagParser
from phloem.config.units import format_bytes
from phloem.core.errors import ConfigError
from phloem.kv.keys import LINK_BYTES
from phloem.stores.adapters.segment.inspect import DirectoryView

__all__ = ["make_parser", "run"]

ACTIONS = ("stats", "ls", "decisions", "remote", "verify", "clear", "warm")
DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 600.0  # clearing a large directory takes a while

_EPILOG = """\
With DIR a storage directory is looked at, beside running servers or without any; else the server
at --url. `verify DIR` reads every object and compares checksums; `verify` alone checks the
invariants of a server's tree and pools. `decisions` says of a server's newest requests (or of
one, with --request-id) where their pages came from and what loading and computing were expected to
take. `remote` says how the newest steps of several ranks read each other's pages, and what each way
was expected to take. `clear` forgets what no running request holds;
with --storage the server's storage directory as well; `clear DIR` empties a directory that no
process uses. `warm FILE` computes prompts once, so that later ones find them: one JSON object a
line with "prompt", "tokens" or "messages" (.jsonl), or a text file that is one prompt.

examples:
  phloem cache stats
  phloem cache ls --limit 5
  phloem cache decisions --request-id chatcmpl-5f0c
  phloem cache verify ~/kept
  phloem cache warm prompts.jsonl
  phloem cache warm prompts.jsonl --storage ~/kept --model smollm2      without a server
"""


def make_parser() -> FlagParser:
    """The command line."""
    parser = FlagParser(
        prog="phloem cache",
        usage="phloem cache {stats,ls,verify,clear} [DIR] [flags] | decisions | remote | warm FILE",
        description="Look at, check, empty and fill caches.",
        epilog=_EPILOG,
    )
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("path", nargs="?", metavar="DIR|FILE", help="storage directory, or prompts")
    parser.add_argument("--url", default=None, help=f"running server (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", default=None, help="bearer token to send")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--limit", type=int, default=20, help="lines of `ls`, `decisions`, `remote` (default: 20)"
    )
    parser.add_argument("--request-id", default=None, help="decisions: of this request alone")
    parser.add_argument(
        "--storage",
        nargs="?",
        const=True,
        default=None,
        metavar="DIR",
        help="clear: the server's directory as well; warm: the directory to fill",
    )
    parser.add_argument(
        "--storage-size", default="20GB", help="warm: what the directory may hold (default: 20GB)"
    )
    parser.add_argument("--model", default=None, help="warm: model to compute with")
    return parser


def run(argv: Sequence[str]) -> int:
    """One action; exit code 1 if `verify` has found something."""
    args = make_parser().parse_args(argv)
    if args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}")
    if args.action == "warm":
        return _warm(args)
    if args.path is None:
        return _on_server(args)
    if args.action not in _DIRECTORY_ACTIONS:
        raise ConfigError(f"`{args.action}` asks a server: give --url, not a directory")
    if args.url is not None:
        raise ConfigError("give a directory, or --url of a server, not both")
    return _on_directory(args)


# A server.


def _on_server(args: argparse.Namespace) -> int:
    calls: dict[str, Callable[[], tuple[str, str, dict[str, Any]]]] = {
        "stats": lambda: ("GET", "/cache/stats", {}),
        "ls": lambda: ("GET", "/cache/ls", {"params": {"limit": args.limit}}),
        "decisions": lambda: ("GET", "/cache/decisions", {"params": _decisions_query(args)}),
        "remote": lambda: ("GET", "/cache/remote", {"params": {"limit": args.limit}}),
        "verify": lambda: ("POST", "/cache/verify", {}),
        "clear": lambda: ("POST", "/cache/clear", {"json": {"storage": bool(args.storage)}}),
    }
    method, path, more = calls[args.action]()
    answer = _ask(args, method, path, more)
    if args.json:
        print(json.dumps(answer))
    else:
        _PRINTERS[args.action](answer)
    return 0 if answer.get("ok", True) else 1


def _ask(args: argparse.Namespace, method: str, path: str, more: dict[str, Any]) -> dict[str, Any]:
    url = args.url or DEFAULT_URL
    headers = {} if args.api_key is None else {"authorization": f"Bearer {args.api_key}"}
    try:
        answer = httpx.request(method, url + path, headers=headers, timeout=_TIMEOUT_S, **more)
    except httpx.HTTPError as error:
        raise ConfigError(f"no answer from {url}: {error}") from error
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url}: {error}") from error
    try:
        body = answer.json()
    except ValueError:
        body = None
    if answer.is_error or not isinstance(body, dict):
        said = body.get("error", {}).get("message") if isinstance(body, dict) else None
        raise ConfigError(said or f"{url}{path} answered with status {answer.status_code}")
    return body


def _print_stats(answer: dict[str, Any]) -> None:
    cache, cached, tiers = answer["cache"], answer["cached_tokens"], answer["tiers"]
    size = cache["page_size"]
    free, evictable = cache["free_pages"], cache["evictable_pages"]
    rows = [
        ("device", f"{cache['total_pages']:,} pages of {size} tokens"),
        ("", f"{free:,} free, {evictable:,} cached, {cache['locked_pages']:,} in use"),
        *_replica_rows(cache.get("replicas")),
        ("host", _host_line(cache)),
        ("prompt tokens", f"{answer['prompt_tokens']:,}"),
        *((f"  from {tier}", f"{count:,}") for tier, count in cached.items() if count),
    ]
    for way in (tiers or {}).get("transfers", ()):
        moved = f"{way['pages_total']:,} pages, {format_bytes(way['bytes_total'])}"
        if way["bandwidth"]:
            moved += f", {format_bytes(int(way['bandwidth']))}/s"
        rows.append((way["kind"], moved))
    for reason, count in (tiers or {}).get("dropped_pages_total", {}).items():
        rows.append((f"dropped: {reason}", f"{count:,} pages"))
    _print_rows(rows)


def _replica_rows(replicas: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Of a server whose ranks copy hot pages of each other."""
    if replicas is None:
        return []
    dropped = replicas["dropped_pages_total"].items()
    why = ", ".join(f"{count:,} for {reason}" for reason, count in dropped if count)
    rows = [("replicas", f"{replicas['pages']:,} of at most {replicas['most_pages']:,} pages")]
    rows.append(("", f"{replicas['made_pages_total']:,} made; dropped: {why or 'none'}"))
    rows.append(("", f"{replicas['served_pages_total']:,} reads of other ranks' pages spared"))
    return rows


def _host_line(cache: dict[str, Any]) -> str:
    total = cache.get("host_total_pages", 0)
    return f"{total:,} pages, {cache['host_free_pages']:,} free" if total else "off"


def _print_list(answer: dict[str, Any]) -> None:
    for row in answer["prefixes"]:
        where = f"{row['device_pages']:>6} {row['host_pages']:>6} {row['storage_pages']:>6}"
        text = " ".join(row["text"].split())
        print(f"{where}  {text[:70]}")
    if answer["prefixes"]:
        print("device   host storage  (pages)", file=sys.stderr)
    print(f"{len(answer['prefixes'])} of {answer['of']} prefixes", file=sys.stderr)


def _decisions_query(args: argparse.Namespace) -> dict[str, Any]:
    query: dict[str, Any] = {"limit": args.limit}
    if args.request_id is not None:
        query["request_id"] = args.request_id
    return query


def _print_decisions(answer: dict[str, Any]) -> None:
    for each in answer["decisions"]:
        pages = ", ".join(f"{count:,} {where}" for where, count in each["pages"].items() if count)
        print(f"{each['request_id']}  {each['prompt_tokens']:,} tokens; pages: {pages}")
        if each["choice"] != "none":
            expected = each["expected_s"]
            print(
                f"    {each['choice']}: {each['load_pages']:,} pages loaded, {each['reason']} "
                f"(all {expected['load_all']:.4f} s, none {expected['compute_all']:.4f} s, "
                f"chosen {expected['chosen']:.4f} s)"
            )
        way = each["storage"]
        if way is not None:
            print(
                f"    storage: {way['found_pages']:,} of {way['asked_pages']:,} found, "
                f"{way['read_pages']:,} read in {way['waited_s']:.3f} s: {way['reason']}"
            )
    if not answer["decisions"]:
        print("nothing is remembered", file=sys.stderr)


def _print_remote(answer: dict[str, Any]) -> None:
    for each in answer["decisions"]:
        print(
            f"step {each['step']}  {each['new_tokens']:,} new tokens of {each['requests']:,} "
            f"requests on {each['cached_tokens']:,} cached"
        )
        first, *others = (
            f"cached {way['cached']}, own {way['own']} {way['layer_s'] * 1e6:.0f} us"
            for way in each["ways"]
        )
        print(f"    {first} a layer; " + "; ".join(others[:2]))
    for each in answer["steps"]:
        ways = f"cached {each['cached']}, own {each['own']}"
        print(f"{each['steps']:,} steps with {ways}", file=sys.stderr)
    if answer["rates"] is None:
        print("the way is prescribed: nothing was measured", file=sys.stderr)


def _print_verified(answer: dict[str, Any]) -> None:
    print("every invariant holds" if answer["ok"] else f"BROKEN: {answer['error']}")


def _print_cleared(answer: dict[str, Any]) -> None:
    locked = answer["locked_pages"]
    print("cleared" + (f"; running requests hold {locked:,} pages" if locked else ""))


_PRINTERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "stats": _print_stats,
    "ls": _print_list,
    "decisions": _print_decisions,
    "remote": _print_remote,
    "verify": _print_verified,
    "clear": _print_cleared,
}


# A directory.


def _on_directory(args: argparse.Namespace) -> int:
    view = DirectoryView(str(Path(args.path).expanduser()))
    try:
        return _DIRECTORY_ACTIONS[args.action](view, args)
    finally:
        view.close()


def _directory_stats(view: DirectoryView, args: argparse.Namespace) -> int:
    objects = view.objects()
    facts = {
        "objects": len(objects),
        "pages": len({each.key[:LINK_BYTES] for each in objects}),
        "object_bytes": sum(each.length for each in objects),
        "used_bytes": view.used_bytes,
        "capacity_bytes": view.capacity_bytes,
        "segments": view.num_segments,
        "unreadable_segments": view.unreadable,
    }
    if args.json:
        print(json.dumps(facts))
        return 0
    _print_rows(
        [(k, format_bytes(v) if k.endswith("_bytes") else f"{v:,}") for k, v in facts.items()]
    )
    return 0


def _directory_list(view: DirectoryView, args: argparse.Namespace) -> int:
    objects = view.objects()
    newest = objects[::-1][: args.limit]
    if args.json:
        rows = [{"key": e.key.hex(), "bytes": e.length, "segment": e.segment} for e in newest]
        print(json.dumps({"objects": rows, "of": len(objects)}))
        return 0
    for each in newest:
        print(f"{each.key.hex()[:32]}...  {each.length:>9,} bytes  segment {each.segment}")
    print(f"{len(newest)} of {len(objects):,} objects, the newest first", file=sys.stderr)
    return 0


def _directory_verify(view: DirectoryView, args: argparse.Namespace) -> int:
    report = view.verify()
    if args.json:
        statuses = {status.value: count for status, count in report.statuses.items()}
        bad = [key.hex() for key in report.bad]
        print(json.dumps({"ok": report.good, "objects": statuses, "bad": bad}))
    else:
        print(f"{report.objects:,} objects, {format_bytes(report.num_bytes)}: ", end="")
        print("all as they were put" if report.good else f"{len(report.bad):,} DAMAGED")
        for key in report.bad[: args.limit]:
            print(f"  {key.hex()}")
    return 0 if report.good else 1


def _directory_clear(view: DirectoryView, args: argparse.Namespace) -> int:
    removed = view.clear()
    print(json.dumps({"removed_segments": removed}) if args.json else f"{removed} segments removed")
    return 0


_DIRECTORY_ACTIONS: dict[str, Callable[[DirectoryView, argparse.Namespace], int]] = {
    "stats": _directory_stats,
    "ls": _directory_list,
    "verify": _directory_verify,
    "clear": _directory_clear,
}


def _print_rows(rows: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name.replace('_', ' '):<{width}}  {value}")


# Warming.


def _warm(args: argparse.Namespace) -> int:
    if args.path is None:
        raise ConfigError("name a file of prompts: phloem cache warm FILE")
    prompts = read_prompts(Path(args.path))
    if isinstance(args.storage, str):
        if args.url is not None:
            raise ConfigError("give --storage DIR, or --url of a server, not both")
        done = warm_directory(prompts, args.storage, args.storage_size, args.model or "smollm2")
    elif args.storage:
        raise ConfigError("--storage must name the directory to fill")
    else:
        done = warm_server(prompts, args.url or DEFAULT_URL, args.api_key, args.model)
    cached, total = done.cached_tokens, done.prompt_tokens
    if args.json:
        print(json.dumps({"prompts": len(prompts), "prompt_tokens": total, "cached": cached}))
    else:
        print(f"{len(prompts)} prompts, {total:,} tokens; {cached:,} were there already")
    return 0
