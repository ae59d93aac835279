"""What a caller asks for, and what comes back: the nouns at the border of the control plane."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import msgspec

from phloem.core.errors import BadRequest

__all__ = [
    "NOTHING_CACHED",
    "CachedTokens",
    "FinishReason",
    "GenerateRequest",
    "OutputChunk",
    "SamplingParams",
    "TokenLogprob",
]

MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 4096


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"  # EOS, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # the client went away, or the server stopped
    ERROR = "error"  # this request failed; `OutputChunk.error` says why


def _check(ok: bool, param: str, rule: str, value: object) -> None:
    if not ok:
        raise BadRequest(f"{param} must be {rule}, got {value!r}", param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to end. Raises BadRequest for values out of range."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None  # None: off; n: the sampled token's and the n best ones'
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _check(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            "between 0 and max_tokens",
            self.min_tokens,
        )
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value = getattr(self, name)
            ok = math.isfinite(value) and low <= value <= high
            _check(ok, name, f"between {low:g} and {high:g}", value)
        _check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p)
        _check(self.top_k >= 0, "top_k", "0 (off) or positive", self.top_k)
        rep = self.repetition_penalty
        _check(0.0 < rep <= 100.0, "repetition_penalty", "above 0 and at most 100", rep)
        if self.logprobs is not None:
            rule = f"between 0 and {MAX_LOGPROBS}"
            _check(0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", rule, self.logprobs)
        if self.seed is not None:
            _check(-(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer", self.seed)
        _check(len(self.stop) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} strings", len(self.stop))
        for text in self.stop:
            ok = 0 < len(text) <= MAX_STOP_CHARS
            _check(
                ok, "stop", f"non-empty strings of at most {MAX_STOP_CHARS} characters", text[:40]
            )
        n = len(self.stop_token_ids)
        _check(n <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids", n)
        n = len(self.logit_bias)
        _check(n <= MAX_LOGIT_BIAS, "logit_bias", f"at most {MAX_LOGIT_BIAS} entries", n)
        for _, bias in self.logit_bias:
            _check(-100.0 <= bias <= 100.0, "logit_bias", "between -100 and 100", bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt to continue. `tokens` is packed int32 (see `core.tokens`), never empty."""

    request_id: str
    tokens: bytes
    sampling: SamplingParams
    namespace: bytes
    routing_key: str | None = None
    priority: int = 0
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTokens:
    """Where the prompt's KV came from at first admission; with `computed` it sums to the prompt."""

    device: int = 0
    remote: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        return self.device + self.remote + self.host + self.storage


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability (natural log) of a sampled token, and the best alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


NOTHING_CACHED = CachedTokens()


class OutputChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one request. The last chunk carries `finish`."""

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop_token: int | None = None  # the id that ended it, if an id did
    error: str | None = None
    prompt_tokens: int = 0
    cached: CachedTokens = NOTHING_CACHED
