"""`phloem bench prefix`: what a cached prefix is worth, and the throughput it is worth it against.

All prompts are random token ids, new in every sample, so nothing hits by accident. Cold and second
turn are measured in interleaved pairs, alternating which goes first: drift of the machine cancels.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from phloem.bench.client import Answer, Client
from phloem.bench.report import Result, paired_ratio, summary
from phloem.config.setting import setting, validate
from phloem.core.errors import ConfigError

__all__ = ["PrefixOptions", "run_prefix"]

DECODE_PROMPT_TOKENS = 16
DECODE_BATCHES = (1, 8, 32)
PREFILL_LENGTHS = (512, 2048)
_FIRST_ID, _LAST_ID = 1_000, 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOptions:
    """Sizes of the measurement."""

    cached_tokens: int = setting(1024, "tokens of the first turn", low=1)
    new_tokens: int = setting(32, "tokens that the second turn adds", low=1)
    pairs: int = setting(8, "interleaved pairs of cold and second turn", low=1)
    decode_tokens: int = setting(64, "tokens of each answer in the decode runs", low=2)
    repeats: int = setting(3, "repeats of each throughput run", low=1)
    seed: int = setting(0, "seed of the prompts")

    def __post_init__(self) -> None:
        validate(self)


async def run_prefix(
    client: Client,
    model: str,
    options: PrefixOptions,
    *,
    on_step: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Measure; `on_step` is called with a name before each run. See `num_steps` for how many."""
    probe = _Probe(client, model, random.Random(f"prefix:{options.seed}"))
    on_step("warm-up")
    await probe.ask(probe.fresh(64), max_tokens=4)
    pairs = [await _pair(probe, options, i, on_step) for i in range(options.pairs)]
    results = [
        paired_ratio("second_turn_ttft_over_cold", pairs, sides=("second_turn_s", "cold_s")),
        summary("cold_ttft_s", [cold for _, cold in pairs], "s"),
        summary("second_turn_ttft_s", [second for second, _ in pairs], "s"),
    ]
    for length in PREFILL_LENGTHS:
        rates = []
        for _ in range(options.repeats):
            on_step(f"prefill {length}")
            answer = await probe.ask(probe.fresh(length), max_tokens=1)
            rates.append(length / answer.ttft_s)
        results.append(summary(f"prefill_{length}_tok_s", rates, "tokens/s"))
    for batch in DECODE_BATCHES:
        rates = []
        for _ in range(options.repeats):
            on_step(f"decode, batch {batch}")
            rates.append(await _decode_rate(probe, batch, options.decode_tokens))
        results.append(summary(f"decode_b{batch}_tok_s", rates, "tokens/s"))
    return results


def num_steps(options: PrefixOptions) -> int:
    """How often `run_prefix` calls `on_step`."""
    runs = len(PREFILL_LENGTHS) + len(DECODE_BATCHES)
    return 1 + options.pairs + options.repeats * runs


class _Probe:
    """Sends token-id prompts and insists on an answer."""

    def __init__(self, client: Client, model: str, rng: random.Random) -> None:
        self._client = client
        self._model = model
        self._rng = rng

    def fresh(self, count: int) -> list[int]:
        """A prompt that no one has sent before."""
        return [self._rng.randrange(_FIRST_ID, _LAST_ID) for _ in range(count)]

    async def ask(self, prompt: list[int], *, max_tokens: int) -> Answer:
        """One greedy request. Raises ConfigError with the server's message if it fails."""
        answer = await self._client.complete(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
        )
        if answer.error is not None:
            raise ConfigError(f"the server refused a prompt of {len(prompt)} ids: {answer.error}")
        return answer


async def _pair(
    probe: _Probe, options: PrefixOptions, index: int, on_step: Callable[[str], None]
) -> tuple[float, float]:
    """(second turn, cold), each the TTFT of a prompt of the same length."""
    on_step(f"pair {index + 1}")
    length = options.cached_tokens + options.new_tokens
    chat = probe.fresh(length)
    await probe.ask(chat[: options.cached_tokens], max_tokens=1)

    async def second() -> float:
        answer = await probe.ask(chat, max_tokens=1)
        _expect_cached(answer, options.cached_tokens)
        return answer.ttft_s

    async def cold() -> float:
        answer = await probe.ask(probe.fresh(length), max_tokens=1)
        _expect_cached(answer, 0)
        return answer.ttft_s

    if index % 2:
        cold_s, second_s = await cold(), await second()
    else:
        second_s, cold_s = await second(), await cold()
    return second_s, cold_s


def _expect_cached(answer: Answer, expected: int) -> None:
    """Refuse to time something else than what the name says (a server may not report it)."""
    got = answer.usage.cached_tokens
    if got is None:
        return
    # The last page of the first turn may be open still (pages of 64 tokens and less).
    good = got == 0 if expected == 0 else max(1, expected - 63) <= got <= expected
    if not good:
        raise ConfigError(f"expected {expected} cached tokens, but the server reports {got}")


async def _decode_rate(probe: _Probe, batch: int, num_tokens: int) -> float:
    """Tokens a second from the first token of the batch to its last, all rows together."""
    answers = await asyncio.gather(
        *(probe.ask(probe.fresh(DECODE_PROMPT_TOKENS), max_tokens=num_tokens) for _ in range(batch))
    )
    first_s = min(answer.sent_s + answer.ttft_s for answer in answers)
    last_s = max(answer.end_s for answer in answers)
    return batch * (num_tokens - 1) / (last_s - first_s)
