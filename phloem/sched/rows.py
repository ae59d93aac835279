"""Rows of a plan: what one request computes in it, and how the request moves on."""

from __future__ import annotations

from phloem.core.plan import RowPlan
from phloem.core.tokens import TOKEN_BYTES
from phloem.sched.state import Phase, RequestState

__all__ = ["decode_row", "prefill_row"]


def decode_row(request: RequestState) -> RowPlan:
    """One token: the last one known, or a future of the step in flight."""
    start = request.num_planned
    known = start < request.num_tokens
    row = RowPlan(
        row=request.row,
        serial=request.serial,
        start=start,
        count=1,
        tokens=request.token_slice(start, start + 1) if known else None,
        sample=True,
        output_index=request.num_outputs + request.num_pending,
        write_from=request.write_from,
        window_from=request.window_from,
    )
    request.num_planned += 1
    request.num_pending += 1
    return row


def prefill_row(request: RequestState, count: int) -> RowPlan:
    """The next `count` tokens of the prompt; the last of them is sampled from."""
    start, end = request.num_planned, request.num_planned + count
    is_last = end == request.prefill_end
    row = RowPlan(
        row=request.row,
        serial=request.serial,
        start=start,
        count=count,
        tokens=request.prefill_tokens[start * TOKEN_BYTES : end * TOKEN_BYTES],
        sample=is_last,
        output_index=request.num_outputs,
        write_from=request.write_from,
        window_from=request.window_from,
    )
    request.num_planned = end
    if is_last:
        request.num_pending = 1
        request.phase = Phase.DECODE
    return row
