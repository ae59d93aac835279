"""What both sides of a pair are asked to do: the workloads, as seen by a client over HTTP.

Prompts are token ids drawn from (seed, task, round): both sides get the same ones, and no prompt
that is to be cold was ever sent before.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from phloem.bench.client import Answer, Client
from phloem.core.errors import PhloemError

__all__ = [
    "Decode",
    "Prefill",
    "Probe",
    "SecondTurn",
    "ServerFailed",
    "Task",
    "decode_rate",
]

_FIRST_ID, _LAST_ID = 1_000, 30_000
# Fewer tokens than this part of an answer in the window where all rows decode: see `decode_rate`.
_LEAST_OVERLAP = 0.25
_CHANCE_TOKENS = 2  # two random prompts may begin alike


class ServerFailed(PhloemError):
    """A server refused or failed a request that it should have answered."""


class Probe:
    """Sends prompts of token ids to one server and insists on an answer."""

    def __init__(self, client: Client, model: str, seed: str) -> None:
        self._client, self._model, self._seed = client, model, seed

    def draw(self, key: str, count: int) -> list[int]:
        """`count` token ids that belong to `key`."""
        rng = random.Random(f"{self._seed}:{key}")
        return [rng.randrange(_FIRST_ID, _LAST_ID) for _ in range(count)]

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """One greedy request. Raises ServerFailed with the server's message."""
        answer = await self._client.complete(
            {
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
        )
        if answer.error is not None:
            raise ServerFailed(f"a prompt of {len(prompt)} ids: {answer.error}")
        return answer


class Task(Protocol):
    """One workload. Figures are rates (more is better) or times (less is better)."""

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str: ...

    async def prime(self, probe: Probe) -> None:
        """Before the first round; not timed. Also the warm-up."""
        ...

    async def sample(self, probe: Probe, round_no: int) -> float:
        """One figure."""
        ...


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens a second of one cold prompt."""

    length: int
    unit: str = "tokens/s"

    @property
    def name(self) -> str:
        return f"prefill_{self.length}"

    async def prime(self, probe: Probe) -> None:
        await probe.ask(probe.draw(f"{self.name}:warm", min(self.length, 512)), 1)

    async def sample(self, probe: Probe, round_no: int) -> float:
        prompt = probe.draw(f"{self.name}:{round_no}", self.length)
        answer = await probe.ask(prompt, 1)
        _expect_cold(answer, self.name)
        return self.length / answer.ttft_s


@dataclass(frozen=True, slots=True)
class Decode:
    """Tokens a second of `batch` answers at once, behind `context` tokens each.

    Contexts are sent once beforehand, so that who has a prefix cache shows decoding alone.
    `busy_core`: another process computes all the while.
    """

    batch: int
    context: int = 512
    num_tokens: int = 64
    busy_core: bool = False
    unit: str = "tokens/s"

    @property
    def name(self) -> str:
        return f"decode_b{self.batch}" + ("_busy_core" if self.busy_core else "")

    async def prime(self, probe: Probe) -> None:
        await self._all(probe, 1)
        await self._all(probe, 4)

    async def sample(self, probe: Probe, round_no: int) -> float:  # noqa: ARG002
        with _one_busy_core() if self.busy_core else contextlib.nullcontext():
            return decode_rate(await self._all(probe, self.num_tokens), self.num_tokens)

    async def _all(self, probe: Probe, num_tokens: int) -> list[Answer]:
        prompts = [probe.draw(f"{self.name}:row{i}", self.context) for i in range(self.batch)]
        return list(await asyncio.gather(*(probe.ask(p, num_tokens) for p in prompts)))


@dataclass(frozen=True, slots=True)
class SecondTurn:
    """Seconds to the first token of a prompt whose first `cached` tokens were just answered."""

    cached: int
    new_tokens: int = 32
    unit: str = "s"

    @property
    def name(self) -> str:
        return f"second_turn_{self.cached}"

    async def prime(self, probe: Probe) -> None:
        await self._two_turns(probe, "warm")

    async def sample(self, probe: Probe, round_no: int) -> float:
        return (await self._two_turns(probe, str(round_no))).ttft_s

    async def _two_turns(self, probe: Probe, key: str) -> Answer:
        chat = probe.draw(f"{self.name}:{key}", self.cached + self.new_tokens)
        await probe.ask(chat[: self.cached], 1)
        return await probe.ask(chat, 1)


@contextlib.contextmanager
def _one_busy_core() -> Iterator[None]:
    """A process that computes and never waits."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            yield
        finally:
            child.kill()


def decode_rate(answers: Sequence[Answer], num_tokens: int) -> float:
    """Tokens a second while all rows decode.

    The window opens when the last row has its first token and closes when the first row ends; a
    row's tokens are spread over its chunks. Where rows hardly overlap (a server that runs them one
    after another), it is all tokens over the whole span.
    """
    opens = max(a.sent_s + a.ttft_s for a in answers)
    closes = min(a.end_s for a in answers)
    inside = sum(_tokens_between(a, num_tokens, opens, closes) for a in answers)
    if inside >= _LEAST_OVERLAP * len(answers) * (num_tokens - 1):
        return inside / (closes - opens)
    first_s = min(a.sent_s + a.ttft_s for a in answers)
    last_s = max(a.end_s for a in answers)
    return len(answers) * (num_tokens - 1) / (last_s - first_s)


def _tokens_between(answer: Answer, num_tokens: int, opens: float, closes: float) -> float:
    """Tokens of an answer after `opens`, until `closes`; the first token is before all of them."""
    later = answer.chunk_s[1:] or [answer.end_s]
    share = sum(opens < at <= closes for at in later) / len(later)
    return share * (num_tokens - 1)


def _expect_cold(answer: Answer, name: str) -> None:
    """Refuse to time something else than what the name says (a server may not report it)."""
    if (answer.usage.cached_tokens or 0) > _CHANCE_TOKENS:
        raise ServerFailed(
            f"{name}: {answer.usage.cached_tokens} tokens of a prompt never sent were cached"
        )
