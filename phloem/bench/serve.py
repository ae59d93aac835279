"""`phloem bench serve`: a load generator for any OpenAI-compatible server.

Closed loop: a fixed number of clients, each sends its next request when its last one is answered.
Open loop: sessions start at seeded Poisson times, whether or not the server keeps up. The hit rate
is that of this run alone: cached over prompt tokens, summed over the `usage` of its answers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phloem.bench.client import Answer, Client
from phloem.bench.report import Result, percentile, summary
from phloem.bench.workloads import Session, Shape, Turn, make_sessions, total_turns
from phloem.config.setting import setting, validate
from phloem.core.errors import ConfigError

__all__ = ["LoadOptions", "LoadReport", "TargetOptions", "run_load"]

DEFAULT_CLIENTS = 4
MAX_SHOWN_ERRORS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """The server to measure."""

    url: str = setting("http://127.0.0.1:8000", "base URL of an OpenAI-compatible server")
    model: str | None = setting(None, "model name to ask for; default: the server's first")
    api_key: str | None = setting(None, "bearer token to send", secret=True)

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What is sent, and how fast."""

    workload: Literal["shared-prefix", "multi-turn", "long-document", "trace"] = setting(
        "shared-prefix", "shape of the prompts"
    )
    trace: str | None = setting(None, "trace file of --workload trace (JSON lines)")
    clients: int | None = setting(
        None, "closed loop: clients at a time; default: 4", low=1, high=4096
    )
    rate: float | None = setting(None, "open loop: sessions started a second (Poisson)", low=1e-6)
    requests: int = setting(64, "requests in all", low=1)
    max_tokens: int = setting(32, "tokens of each answer (sent with ignore_eos)", low=1)
    prompts: Literal["chat", "text", "tokens"] = setting(
        "chat", "chat messages, completion text, or completion token ids of exact length"
    )
    prefix_tokens: int = setting(512, "length of the shared part of a prompt", low=1)
    unique_tokens: int = setting(64, "length of each request's own part", low=1)
    groups: int = setting(4, "different shared parts", low=1)
    turns: int = setting(4, "turns of a chat, or questions to a document", low=1)
    seed: int = setting(0, "seed of the workload and of arrival times")

    def __post_init__(self) -> None:
        validate(self)
        if self.clients is not None and self.rate is not None:
            raise ConfigError("--clients (closed loop) and --rate (open loop) exclude each other")
        if self.trace is not None and self.workload != "trace":
            raise ConfigError(f"--trace needs --workload trace, not {self.workload}")
        if self.workload == "trace" and self.trace is None:
            raise ConfigError("--workload trace needs --trace FILE")

    def shape(self) -> Shape:
        """The sizes that the workload's maker wants."""
        return Shape(
            requests=self.requests,
            max_tokens=self.max_tokens,
            prefix_tokens=self.prefix_tokens,
            unique_tokens=self.unique_tokens,
            groups=self.groups,
            turns=self.turns,
            seed=self.seed,
            trace=None if self.trace is None else Path(self.trace),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """All answers of a run, in order of their end."""

    answers: tuple[Answer, ...]
    duration_s: float

    @property
    def good(self) -> list[Answer]:
        return [a for a in self.answers if a.error is None]

    @property
    def errors(self) -> list[str]:
        return [a.error for a in self.answers if a.error is not None]

    def results(self) -> list[Result]:
        """The figures of the run, under stable names."""
        good = self.good
        ttft = [a.ttft_s for a in good]
        gaps = [gap for a in good for gap in a.gaps_s]
        e2e = [a.e2e_s for a in good]
        prompt = _sum(a.usage.prompt_tokens for a in good)
        cached = _sum(a.usage.cached_tokens for a in good)
        output = _sum(a.usage.completion_tokens for a in good)
        span = self.duration_s
        return [
            Result(name="requests", value=len(self.answers), unit="requests"),
            Result(name="errors", value=len(self.errors), unit="requests"),
            Result(name="duration_s", value=span, unit="s"),
            _rate("request_rate", len(good), span, "requests/s"),
            Result(name="prompt_tokens", value=prompt, unit="tokens"),
            Result(name="cached_tokens", value=cached, unit="tokens"),
            _rate("hit_rate", cached, prompt, "ratio"),
            Result(name="output_tokens", value=output, unit="tokens"),
            _rate("output_tok_s", output, span, "tokens/s"),
            _rate("prompt_tok_s", prompt, span, "tokens/s"),
            summary("ttft_s", ttft, "s"),
            *_percentiles("ttft", ttft),
            *_percentiles("itl", gaps),
            *_percentiles("e2e", e2e),
        ]


async def run_load(
    client: Client,
    model: str,
    options: LoadOptions,
    *,
    on_answer: Callable[[Answer], None] = lambda _: None,
) -> LoadReport:
    """Play the workload against a server. `on_answer` is called as each request ends."""
    sessions = make_sessions(options.workload, options.shape())
    if not sessions:
        raise ConfigError("the workload holds no request")
    player = _Player(client, model, options, on_answer)
    begin = time.monotonic()
    if options.rate is not None:
        await _open_loop(player, sessions, options.rate, options.seed)
    else:
        await _closed_loop(player, sessions, options.clients or DEFAULT_CLIENTS)
    return LoadReport(answers=tuple(player.answers), duration_s=time.monotonic() - begin)


def num_requests(options: LoadOptions) -> int:
    """Requests that a run of these options will make (for the progress bar)."""
    return total_turns(make_sessions(options.workload, options.shape()))


class _Player:
    """Plays sessions, keeping each one's history as its client would."""

    def __init__(
        self,
        client: Client,
        model: str,
        options: LoadOptions,
        on_answer: Callable[[Answer], None],
    ) -> None:
        self._client = client
        self._model = model
        self._prompts = options.prompts
        self._on_answer = on_answer
        self.answers: list[Answer] = []

    async def play(self, session: Session) -> None:
        """All turns of a session; it ends early if one of them fails."""
        history: Any = "" if self._prompts == "text" else []
        for turn in session.turns:
            history = self._say(history, turn)
            answer = await self._client.complete(self._body(history, turn))
            self.answers.append(answer)
            self._on_answer(answer)
            if answer.error is not None:
                return
            history = self._hear(history, answer)

    def _say(self, history: Any, turn: Turn) -> Any:
        if self._prompts == "tokens":
            return history + [id_ for piece in turn.pieces for id_ in piece.ids()]
        text = "\n".join(piece.text() for piece in turn.pieces)
        if self._prompts == "text":
            return history + text
        return [*history, {"role": "user", "content": text}]

    def _hear(self, history: Any, answer: Answer) -> Any:
        if self._prompts == "tokens":
            return history  # the ids of an answer are not in the API: they stay out of the prompt
        if self._prompts == "text":
            return history + answer.text + "\n"
        return [*history, {"role": "assistant", "content": answer.text}]

    def _body(self, history: Any, turn: Turn) -> dict[str, Any]:
        prompt = {"messages" if self._prompts == "chat" else "prompt": history}
        return {
            "model": self._model,
            **prompt,
            "max_tokens": turn.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


async def _closed_loop(player: _Player, sessions: Sequence[Session], clients: int) -> None:
    queue = iter(sessions)

    async def one_client(source: Iterator[Session]) -> None:
        for session in source:
            await player.play(session)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(sessions))):
            group.create_task(one_client(queue))


async def _open_loop(player: _Player, sessions: Sequence[Session], rate: float, seed: int) -> None:
    rng = random.Random(f"arrivals:{seed}")
    begin, at_s = time.monotonic(), 0.0
    async with asyncio.TaskGroup() as group:
        for session in sessions:
            at_s += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, begin + at_s - time.monotonic()))
            group.create_task(player.play(session))


def _percentiles(stem: str, samples: Sequence[float]) -> list[Result]:
    return [
        Result(name=f"{stem}_p{p}_s", value=percentile(samples, p), unit="s") for p in (50, 90, 99)
    ]


def _sum(counts: Any) -> int | None:
    """The sum, or None if any answer lacks the figure: a part would pass for the whole."""
    values = list(counts)
    return None if any(value is None for value in values) else sum(values)


def _rate(name: str, part: float | None, whole: float | None, unit: str) -> Result:
    value = None if part is None or not whole else part / whole
    return Result(name=name, value=value, unit=unit)
