"""Dispatch to a subcommand, and turn errors into one line and an exit code.

0 done; 1 the engine or a connection failed; 2 the user can mend it; 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from phloem.config.setting import did_you_mean
from phloem.core.errors import ConfigError, PhloemError, UserError

__all__ = ["COMMANDS", "main"]


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: its module has `run(argv) -> exit code`, imported only when it is called."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("phloem.cli.serve", "serve a model over HTTP (OpenAI-compatible)"),
    "chat": Command("phloem.cli.chat", "chat in the terminal with a server or a local model"),
    "replay": Command(
        "phloem.cli.replay", "run request traces through the real scheduler and cache"
    ),
    "cache": Command("phloem.cli.cache", "look at, check, empty and fill a cache"),
    "bench": Command("phloem.cli.bench", "measure a server, the prefix tree or the scheduler"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `phloem ...` and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output left (`| head`): nothing more to say, and nowhere to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else 2
    name = words[0]
    if name in ("-V", "--version", "version"):
        print(f"phloem {_version()}")
        return 0
    if name not in COMMANDS:
        near = did_you_mean(name, COMMANDS)
        return _complain("phloem", f"unknown command {name!r}{near} (see phloem --help)")
    try:
        return int(importlib.import_module(COMMANDS[name].module).run(words[1:]))
    except (ConfigError, UserError) as error:
        return _complain(f"phloem {name}", str(error))
    except PhloemError as error:
        _complain(f"phloem {name}", str(error) or type(error).__name__)
        return 1


def _complain(who: str, message: str) -> int:
    print(f"{who}: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _version() -> str:
    import phloem

    return phloem.__version__


def _help() -> str:
    lines = [
        "usage: phloem COMMAND [...]",
        "",
        "An LLM server whose KV cache is one global, shared resource.",
        "",
        "commands:",
        *(f"  {name:<8} {command.summary}" for name, command in COMMANDS.items()),
        "",
        "  phloem COMMAND --help   flags and examples of a command",
        "  phloem --version        the version",
        "",
        "examples:",
        "  phloem serve smollm2                        a small model on http://127.0.0.1:8000",
        "  phloem serve ./Qwen3-0.6B --dtype bf16      a Hugging Face folder, or a .gguf file",
        "  phloem chat                                 talk to that server",
        "  phloem bench serve --workload multi-turn    measure it",
    ]
    return "\n".join(lines)
