"""`phloem serve MODEL`: settings, progress while loading, start-up table, server, orderly end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phloem.config import Config
from phloem.config.flags import FlagParser, add_settings, given_settings
from phloem.config.launch import Launch, check_launch, launch_from
from phloem.config.load import config_from, config_groups
from phloem.core.errors import ConfigError

__all__ = ["make_parser", "parse_config", "run"]

_EPILOG = """\
A YAML file given with --config may hold every flag, one a line (page-size: 16); what stands on the
command line wins.

examples:
  phloem serve smollm2                             on http://127.0.0.1:8000
  phloem serve ./Qwen3-0.6B --dtype bf16 --kv-memory 8GB
  phloem serve model.gguf --host 0.0.0.0 --port 9000 --api-key SECRET
  phloem serve --config phloem.yaml
"""


class _Once(argparse.Action):
    """A flag that may be given once: a second file would silently shadow the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is given twice")
        setattr(namespace, self.dest, values)


def make_parser() -> FlagParser:
    """Every setting as a flag, grouped by concern."""
    parser = FlagParser(
        prog="phloem serve",
        usage="phloem serve MODEL [flags]",
        description="Serve a model over HTTP, OpenAI-compatible.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--config", metavar="FILE", action=_Once, help="YAML file with any of the flags below"
    )
    for title, cls in config_groups().items():
        add_settings(parser, cls, title=title)
    return parser


def parse_config(argv: Sequence[str]) -> Config:
    """The settings of a server from its command line. Leaves with exit code 2 on bad usage."""
    args = make_parser().parse_args(argv)
    file = None if args.config is None else Path(args.config)
    config = config_from(given_settings(args), file=file)
    if not config.model.model:
        raise ConfigError(
            "no model given: name a Hugging Face folder, a .gguf file, or smollm2 "
            "(phloem serve smollm2)"
        )
    return config


def run(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the server's exit code.

    Of the processes that torchrun starts rank 0 is the server, and the others serve it.
    """
    config = parse_config(argv)
    launch = launch_from(os.environ)
    if launch is not None:
        check_launch(config, launch)
    who = "%(name)s" if launch is None else f"rank {launch.rank}"
    logging.basicConfig(
        level=config.runtime.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {who}: %(message)s",
    )
    if launch is not None and launch.rank > 0:
        from phloem.engine.host_rank import serve_rank

        return serve_rank(launch, config.parallel.join_timeout_s)
    # Imported late: usage errors are answered before the web framework is loaded.
    from phloem.server import bind

    # Taken now: a port in use shows before a minute of loading, not after it.
    sock = bind(config.server.host, config.server.port)
    try:
        return _serve(config, sock, launch)
    finally:
        sock.close()


def _serve(config: Config, sock: socket.socket, launch: Launch | None) -> int:
    from rich.console import Console

    from phloem.cli.screen import facts_table, loading_bar
    from phloem.engine import AsyncEngine, startup_rows
    from phloem.engine.process import DEFAULT_BUILDER, HOSTS_BUILDER
    from phloem.server import Server, ServerSettings, create_app, serve_async

    options = config.server
    name = config.model.served_model_name
    settings = ServerSettings(
        served_model_names=() if name is None else (name,), api_key=options.api_key
    )
    builder = DEFAULT_BUILDER if launch is None else HOSTS_BUILDER
    with loading_bar() as on_load:
        engine = AsyncEngine.launch(config, on_load=on_load, builder=builder)
    console = Console(highlight=False)
    console.print(facts_table(startup_rows(engine.facts)))

    def on_ready(port: int) -> None:
        served = name or engine.card.name
        _announce(options.host, port, served, with_key=options.api_key is not None)

    app = create_app(engine, settings)
    server = Server(app, engine, on_ready=on_ready, drain_timeout_s=options.drain_timeout_s)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        return runner.run(serve_async(server, sock))


def _announce(host: str, port: int, model: str, *, with_key: bool) -> None:
    """The URL, and a request that can be pasted as it is."""
    reachable = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    url = f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{port}"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if with_key else ""
    print(f"\nServing {model} at {url}   (Ctrl-C stops)\n")
    print(f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{{")
    print(f'  "model": "{model}",')
    print('  "messages": [{"role": "user", "content": "Say hello in one short sentence."}]}\'')
    sys.stdout.flush()
