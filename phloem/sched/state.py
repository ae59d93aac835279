"""One request in the scheduler's hands, from `add` to its last chunk.

                 admit                 last chunk planned
    QUEUED ----------------> PREFILL --------------------> DECODE
      ^  |                    |   |                         |  |
      |  |     retract        |   |        retract          |  |
      +--|--------------------+---|-------------------------+  |
         |  abort                 |  abort, error              |  stop, length, abort, error
         +------------------------+----------------------------+----------> FINISHED

Positions of a running request (each count is <= the next one; KV is written left to right):

    0        num_computed         num_planned              num_tokens + num_pending
    |--------------|--------------------|----------------------------|
     KV in pages     in flight: a load,   still to be planned
                     then step k
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from phloem.core.request import CachedTokens, GenerateRequest
from phloem.core.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from phloem.cache import Match, Reservation

__all__ = ["Phase", "RequestState"]


class Phase(enum.Enum):
    """Where a request stands."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class RequestState:
    """Mutable; owned by the Scheduler alone."""

    __slots__ = (
        "cached",
        "counts_load",
        "final_tokens",
        "kept_pages",
        "load_id",
        "load_pages",
        "match",
        "match_version",
        "matched_pages",
        "max_tokens",
        "may_load",
        "min_tokens",
        "num_computed",
        "num_pages",
        "num_pending",
        "num_planned",
        "num_prompt",
        "num_tokens",
        "num_uncached",
        "phase",
        "prefill_end",
        "prefill_tokens",
        "priority",
        "queued_at_pass",
        "queued_at_tokens",
        "request",
        "request_id",
        "reservation",
        "retractions",
        "row",
        "seed",
        "serial",
        "stop_ids",
        "storage_pages",
        "tokens",
        "was_computed",
        "window_from",
        "write_from",
    )

    def __init__(self, request: GenerateRequest, *, seed: int, eos_ids: tuple[int, ...]) -> None:
        sampling = request.sampling
        self.request = request
        self.request_id = request.request_id
        self.priority = request.priority
        self.seed = seed
        eos = () if sampling.ignore_eos else eos_ids
        self.stop_ids = tuple(dict.fromkeys(eos + sampling.stop_token_ids))
        self.max_tokens = sampling.max_tokens
        self.min_tokens = sampling.min_tokens

        self.phase = Phase.QUEUED
        self.tokens = bytearray(request.tokens)  # prompt, then what was generated
        self.num_prompt = len(request.tokens) // TOKEN_BYTES
        self.num_tokens = self.num_prompt
        # The last sampled token never gets KV: nobody reads it.
        self.final_tokens = self.num_prompt + self.max_tokens - 1

        # Of the queue.
        self.queued_at_pass = 0
        self.queued_at_tokens = 0
        self.match: Match | None = None
        self.match_version = -1
        self.matched_pages = 0  # before the first one to compute
        self.kept_pages = 0  # that need no new page: more than these after a restart lower down
        self.num_uncached = self.num_prompt

        # Of a running request.
        self.row = -1
        self.serial = -1
        self.reservation: Reservation | None = None
        self.num_pages = 0
        self.num_computed = 0
        self.num_planned = 0
        self.load_id: int | None = None  # a load from the host that fills pages of it
        self.load_pages = 0
        self.storage_pages = 0  # of these: brought from storage for this request
        self.may_load = True  # False after a load has failed
        self.num_pending = 0  # sampled in a step in flight: futures
        self.prefill_tokens = b""  # prompt, and after a retraction what it had generated
        self.prefill_end = 0
        self.write_from = self.window_from = 0  # see `core.plan.RowPlan`

        # For the counters.
        self.cached: CachedTokens | None = None  # at first admission; its load's part at its end
        self.counts_load = False  # the load in flight is that of the first admission
        self.retractions = 0
        self.was_computed = 0  # positions that had KV when it was retracted

    @property
    def num_outputs(self) -> int:
        """Tokens generated and known."""
        return self.num_tokens - self.num_prompt

    @property
    def to_compute(self) -> int:
        """Known positions (and futures) that no plan covers yet."""
        return self.num_tokens + self.num_pending - self.num_planned

    @property
    def wants_decode(self) -> bool:
        """The next token is to be computed, and it is not known to be the end."""
        return (
            self.phase is Phase.DECODE
            and self.to_compute > 0
            and self.num_outputs + self.num_pending < self.max_tokens
        )

    def known_tokens(self) -> bytes:
        """Packed ids of the prompt and of what was generated and is known."""
        return self.request.tokens if self.num_outputs == 0 else bytes(self.tokens)

    def token_slice(self, start: int, end: int) -> bytes:
        """Packed ids of the known positions start ... end - 1."""
        with memoryview(self.tokens) as view:
            return bytes(view[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def append(self, token: int) -> None:
        """A sampled token has become known. Raises OverflowError for an id outside int32."""
        self.tokens += token.to_bytes(TOKEN_BYTES, "little", signed=True)
        self.num_tokens += 1
