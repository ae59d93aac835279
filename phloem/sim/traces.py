"""Traces of requests: one JSON object a line; a name in .gz is unpacked.

    timestamp (ms), input_length, output_length, hash_ids[, expect_cached_infinite]

`hash_ids[i]` names the N tokens Ni ... Ni+N-1 of the prompt (N is 16 here, 512 in some recordings):
equal ids are equal text. Here an id becomes N token ids drawn from a generator seeded by it; the
last ones are cut to `input_length`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

from phloem.core.errors import PhloemError
from phloem.core.tokens import tokens_to_bytes

__all__ = ["TOKENS_PER_ID", "TraceError", "TraceRequest", "read_trace", "trace_tokens"]

TOKENS_PER_ID = 16
MAX_HASH_ID = 1 << 50  # times the tokens of an id it still fits in 64 bits
MAX_TOKENS_PER_ID = 4096


class TraceError(PhloemError):
    """A trace that cannot be read; says file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One line of a trace."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]
    expect_cached: int | None = None  # with an unlimited pool and pages of 16 tokens
    tokens_per_id: int = TOKENS_PER_ID

    def __post_init__(self) -> None:
        if not 1 <= self.tokens_per_id <= MAX_TOKENS_PER_ID:
            raise TraceError(f"an id stands for 1 to {MAX_TOKENS_PER_ID} tokens")
        if self.num_prompt_tokens < 1:
            raise TraceError(f"input_length must be at least 1, got {self.num_prompt_tokens}")
        for hash_id in self.hash_ids:
            if not 0 <= hash_id < MAX_HASH_ID:
                raise TraceError(f"hash_ids must be below 2**50 and not negative, got {hash_id}")
        need = -(-self.num_prompt_tokens // self.tokens_per_id)
        if len(self.hash_ids) != need:
            raise TraceError(
                f"{self.num_prompt_tokens} tokens need {need} hash_ids, got {len(self.hash_ids)}"
            )


def read_trace(path: Path, *, tokens_per_id: int = TOKENS_PER_ID) -> Iterator[TraceRequest]:
    """The requests of a trace, in order. Raises TraceError, also for a file that is not there."""
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse(line, f"{path}:{number}", tokens_per_id)
    except (OSError, EOFError, zlib.error) as error:
        text = error.strerror if isinstance(error, OSError) else None
        raise TraceError(f"{path}: {text or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text") from error


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _parse(line: str, where: str, tokens_per_id: int) -> TraceRequest:
    try:
        data = json.loads(line)
        expect = data.get("expect_cached_infinite")
        return TraceRequest(
            arrival_s=float(data["timestamp"]) / 1000,
            num_prompt_tokens=int(data["input_length"]),
            num_output_tokens=int(data["output_length"]),
            hash_ids=tuple(int(i) for i in data["hash_ids"]),
            expect_cached=None if expect is None else int(expect),
            tokens_per_id=tokens_per_id,
        )
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from error
    except KeyError as error:
        raise TraceError(f"{where}: no field {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise TraceError(f"{where}: not a trace line ({error})") from error


def trace_tokens(request: TraceRequest, *, vocab_size: int) -> bytes:
    """The prompt of a trace line as packed ids below `vocab_size`."""
    ids = np.array(request.hash_ids, dtype=np.uint64)
    size = request.tokens_per_id
    counters = np.arange(size, dtype=np.uint64) + ids[:, None] * np.uint64(size)
    tokens = _splitmix64(counters.ravel())[: request.num_prompt_tokens] % np.uint64(vocab_size)
    return tokens_to_bytes(tokens.astype(np.int32))


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijective mixer: counters become uniformly distributed numbers (wraps at 2**64)."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
