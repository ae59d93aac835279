"""Turns: which steps the running answers join, and which belong to the oldest prefill.

Prompts go first. A step that computes a slice of one has no decodes, until with this slice
`max_prefill_tokens` of prompts lie between the answers' tokens:

    slice of a prompt     512   512   512   512          (max_prefill_tokens 1024, slice 512)
    decodes                -     x     -     x     x     x

and every OLDEST_TURN-th slice begins with the prefill that has run longest, so that an endless
stream of shorter ones cannot stop it.
"""

from __future__ import annotations

from phloem.sched.packing import Slice

__all__ = ["OLDEST_TURN", "Turns"]

OLDEST_TURN = 8


class Turns:
    """Counts what was planned."""

    def __init__(self, max_prefill_tokens: int, step: Slice) -> None:
        self._budget = max_prefill_tokens
        self._step = step
        self._without = 0  # prompt tokens since the last step with decodes
        self._slices = 0
        self.last_was_long = False  # the last step had more prompt tokens than share one

    @property
    def decodes_are_due(self) -> bool:
        """Running answers get their token in this step, whatever prompts wait."""
        return self._without + self._step.tokens >= self._budget

    @property
    def is_oldest_ones(self) -> bool:
        """The next slice begins with the oldest prefill."""
        return self._slices % OLDEST_TURN == OLDEST_TURN - 1

    def planned(self, *, prefill_tokens: int, decodes: bool) -> None:
        """A step has been planned."""
        self._slices += prefill_tokens > 0
        self.last_was_long = prefill_tokens > self._step.fill
        self._without = 0 if decodes else self._without + prefill_tokens
