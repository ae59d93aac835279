"""What callers are told: one chunk of output."""

from __future__ import annotations

from phloem.core.plan import RowResult
from phloem.core.request import NOTHING_CACHED, FinishReason, OutputChunk
from phloem.sched.state import RequestState

__all__ = ["output_chunk"]


def output_chunk(
    request: RequestState,
    *,
    outcome: RowResult | None = None,
    finish: FinishReason | None = None,
    error: str | None = None,
) -> OutputChunk:
    """The token of `outcome`, if there is one; the last chunk of the request if it has `finish`."""
    is_stop = outcome is not None and finish is FinishReason.STOP
    logprob = None if outcome is None else outcome.logprob
    return OutputChunk(
        request_id=request.request_id,
        tokens=() if outcome is None else (outcome.token,),
        logprobs=() if logprob is None else (logprob,),
        finish=finish,
        stop_token=outcome.token if outcome is not None and is_stop else None,
        error=error,
        prompt_tokens=request.num_prompt,
        cached=request.cached or NOTHING_CACHED,
    )
