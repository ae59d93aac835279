"""`phloem chat`: talk to a server in the terminal, and see what the cache saved at each turn."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console

from phloem.bench.client import Answer, Client
from phloem.bench.local_server import local_server
from phloem.config.flags import FlagParser, add_settings, build_settings, given_settings
from phloem.config.setting import setting, validate
from phloem.core.errors import ConfigError

__all__ = ["ChatOptions", "run"]

_EPILOG = """\
In the chat: Ctrl-C stops an answer, Ctrl-D leaves, /new starts over.

examples:
  phloem chat                                    the server on http://127.0.0.1:8000
  phloem chat --url http://box:8000 --system "Answer in one sentence."
  phloem chat smollm2                            start a server for this chat alone
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Whom to talk to, and how."""

    local_model: str | None = setting(
        None, "model to start a server for; default: none, talk to --url", positional=True
    )
    url: str | None = setting(None, "running server; default: http://127.0.0.1:8000")
    model: str | None = setting(None, "model name to ask for; default: the server's first")
    api_key: str | None = setting(None, "bearer token to send", secret=True)
    system: str | None = setting(None, "system message")
    max_tokens: int = setting(512, "longest answer in tokens", low=1)
    temperature: float | None = setting(
        None,
        "randomness; 0: always the likeliest token; default: as the model recommends",
        low=0,
        high=2,
    )

    def __post_init__(self) -> None:
        validate(self)
        if self.local_model is not None and self.url is not None:
            raise ConfigError("give a model to start, or --url of a running server, not both")


def run(argv: Sequence[str]) -> int:
    """Chat until Ctrl-D."""
    parser = FlagParser(
        prog="phloem chat",
        usage="phloem chat [LOCAL_MODEL] [flags]",
        description="Chat in the terminal. Each turn shows how much of its prompt was cached.",
        epilog=_EPILOG,
    )
    add_settings(parser, ChatOptions, title="chat")
    options = build_settings(ChatOptions, given_settings(parser.parse_args(argv)))
    with _server(options) as url:
        return _chat(url, options)


@contextlib.contextmanager
def _server(options: ChatOptions) -> Iterator[str]:
    if options.local_model is None:
        yield options.url or "http://127.0.0.1:8000"
        return
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        with console.status(f"loading {options.local_model} ..."):
            url = stack.enter_context(local_server(options.local_model))
        yield url


def _chat(url: str, options: ChatOptions) -> int:
    """One loop for all turns; between them the terminal is read without one.

    Inside `runner.run` Ctrl-C cancels the turn; at the prompt it only clears the line.
    """
    with asyncio.Runner() as runner:
        client = Client(url, api_key=options.api_key)
        try:
            model = options.model or runner.run(client.first_model())
            talk = _Talk(client, model, options)
            talk.console.print(f"{model} at {client.url}. Ctrl-C stops an answer, Ctrl-D leaves.")
            while (text := _ask()) is not None:
                if text == "/new":
                    talk.start_over()
                elif text:
                    runner.run(talk.turn(text))
            print()
        finally:
            runner.run(client.close())
    return 0


def _ask() -> str | None:
    """A line of the user, or None at the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - its import gives input() editing and history
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()


class _Talk:
    """A conversation: its messages, and how a turn is played and shown."""

    def __init__(self, client: Client, model: str, options: ChatOptions) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._messages: list[dict[str, str]] = []
        self.console = Console(highlight=False)
        self.start_over()

    def start_over(self) -> None:
        """Forget all but the system message."""
        system = self._options.system
        self._messages = [{"role": "system", "content": system}] if system else []

    async def turn(self, text: str) -> None:
        """Send what the user said and print the answer as it comes; Ctrl-C stops it."""
        self._messages.append({"role": "user", "content": text})
        answer = Answer(time.monotonic())
        stopped = False
        try:
            await self._show(answer)
        except asyncio.CancelledError:
            stopped = True
        answer.end_s = answer.end_s or time.monotonic()
        print()
        if answer.error is not None:
            self._messages.pop()
            self.console.print(f"error: {answer.error}", style="red", markup=False)
            return
        self._messages.append({"role": "assistant", "content": answer.text})
        self.console.print(
            _account(answer, stopped=stopped), style="dim", markup=False, soft_wrap=True
        )

    async def _show(self, answer: Answer) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": self._messages,
            "max_tokens": self._options.max_tokens,
            "temperature": self._options.temperature,
        }
        try:
            async with contextlib.aclosing(self._client.stream(body, answer)) as pieces:
                async for piece in pieces:
                    answer.text += piece
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        except httpx.HTTPError as error:
            answer.error = str(error) or type(error).__name__


def _account(answer: Answer, *, stopped: bool) -> str:
    """What the turn cost, in one line."""
    usage, parts = answer.usage, []
    if usage.prompt_tokens is not None:
        parts.append(f"prompt {usage.prompt_tokens} tokens")
        if usage.cached_tokens is not None:
            share = usage.cached_tokens / max(usage.prompt_tokens, 1)
            parts[-1] += f", {usage.cached_tokens} cached ({share:.0%})"
        parts.append(f"answer {usage.completion_tokens}")
    if answer.chunk_s:
        parts.append(f"first text after {answer.ttft_s:.2f} s")
    if len(answer.gaps_s) > 1:
        parts.append(f"{len(answer.gaps_s) / sum(answer.gaps_s):.0f} chunks/s")
    if stopped:
        parts.append("stopped")
    return "[" + "; ".join(parts) + "]"
