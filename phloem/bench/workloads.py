"""Seeded workloads for `phloem bench serve`: sessions of turns, as token ids or as text.

A workload is a list of sessions; a session is what one user says, turn by turn. The same seed and
options give the same sessions. Lengths are in tokens; as text they are met to about 20 %, since no
tokenizer is at hand here (three invented words make five tokens).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phloem.core.errors import ConfigError

__all__ = ["WORKLOADS", "Piece", "Session", "Shape", "Turn", "make_sessions"]

# A piece of prompt is made from a seed of its own, so that equal keys give equal pieces.
# Ids below 1,000 are left out: many vocabularies keep their control tokens there.
_FIRST_ID, _LAST_ID = 1_000, 30_000
_WORDS_PER_TOKEN = 0.6
_TRACE_PAGE_TOKENS = 16
_SYLLABLES = [a + b for a in "bdfghklmnprstvwz" for b in "aeio"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of prompt: `key` decides its content, `num_tokens` its length."""

    key: str
    num_tokens: int

    def ids(self) -> list[int]:
        """The piece as token ids, exactly `num_tokens` of them."""
        rng = random.Random(self.key)
        return [rng.randrange(_FIRST_ID, _LAST_ID) for _ in range(self.num_tokens)]

    def text(self) -> str:
        """The piece as invented words."""
        rng = random.Random(self.key)
        count = max(1, round(self.num_tokens * _WORDS_PER_TOKEN))
        words = ("".join(rng.choices(_SYLLABLES, k=rng.randint(1, 2))) for _ in range(count))
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says at once, and the longest answer wanted."""

    pieces: tuple[Piece, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """One user's turns, in order; each waits for the answer to the one before."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a workload."""

    requests: int
    max_tokens: int
    prefix_tokens: int
    unique_tokens: int
    groups: int
    turns: int
    seed: int
    trace: Path | None = None


def make_sessions(workload: str, shape: Shape) -> list[Session]:
    """The sessions of a named workload, `shape.requests` turns in all."""
    return WORKLOADS[workload](shape)


def _shared_prefix(shape: Shape) -> list[Session]:
    """`groups` long prefixes, each shared by many requests with a short end of their own."""
    rng = random.Random(f"order:{shape.seed}")
    out = []
    for i in range(shape.requests):
        group = rng.randrange(shape.groups)
        prefix = Piece(f"{shape.seed}:prefix:{group}", shape.prefix_tokens)
        own = Piece(f"{shape.seed}:own:{i}", shape.unique_tokens)
        out.append(Session((Turn((prefix, own), shape.max_tokens),)))
    return out


def _multi_turn(shape: Shape) -> list[Session]:
    """Chats of `turns` turns; the first begins with a system text that a group shares."""
    out: list[Session] = []
    left = shape.requests
    while left > 0:
        chat = len(out)
        turns = []
        for number in range(min(shape.turns, left)):
            own = Piece(f"{shape.seed}:chat:{chat}:{number}", shape.unique_tokens)
            pieces: tuple[Piece, ...] = (own,)
            if number == 0:
                group = chat % shape.groups
                pieces = (Piece(f"{shape.seed}:system:{group}", shape.prefix_tokens), own)
            turns.append(Turn(pieces, shape.max_tokens))
        left -= len(turns)
        out.append(Session(tuple(turns)))
    return out


def _long_document(shape: Shape) -> list[Session]:
    """Documents of four prefixes' length, each asked `turns` questions one after another."""
    out: list[Session] = []
    for i in range(shape.requests):
        document, question = divmod(i, shape.turns)
        body = Piece(f"{shape.seed}:document:{document}", 4 * shape.prefix_tokens)
        own = Piece(f"{shape.seed}:question:{document}:{question}", shape.unique_tokens)
        out.append(Session((Turn((body, own), shape.max_tokens),)))
    return out


def _trace(shape: Shape) -> list[Session]:
    """The first `requests` lines of a trace file; equal hash ids are equal runs of 16 tokens."""
    if shape.trace is None:
        raise ConfigError("--workload trace needs --trace FILE")
    out: list[Session] = []
    number = 0
    try:
        with shape.trace.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                if len(out) == shape.requests:
                    break
                if line.strip():
                    out.append(_trace_session(json.loads(line), shape))
    except OSError as error:
        raise ConfigError(f"--trace {shape.trace}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"--trace {shape.trace}: line {number} is no request "
            "(JSON with input_length and hash_ids)"
        ) from None
    return out


def _trace_session(line: dict[str, Any], shape: Shape) -> Session:
    left, pieces = int(line["input_length"]), []
    for block in line["hash_ids"]:
        count = min(_TRACE_PAGE_TOKENS, left)
        if count > 0:
            # A cut last block is the head of the whole one: ids come from one seed, in order.
            pieces.append(Piece(f"{shape.seed}:block:{int(block)}", count))
        left -= count
    wanted = max(1, min(shape.max_tokens, int(line["output_length"])))
    return Session((Turn(tuple(pieces), wanted),))


WORKLOADS: dict[str, Callable[[Shape], list[Session]]] = {
    "shared-prefix": _shared_prefix,
    "multi-turn": _multi_turn,
    "long-document": _long_document,
    "trace": _trace,
}


def total_turns(sessions: Sequence[Session]) -> int:
    """Requests that the sessions make."""
    return sum(len(session.turns) for session in sessions)
