"""Prefill packing: which prefills compute how many tokens in this step.

The shortest first. Where a step takes as long as it has tokens (on a CPU), a prompt that shares a
step with others only waits for them: so others join the first one only while the step has fewer
than `fill` tokens, which are soon computed. Where a step is cheaper by the token the more
it has (on a GPU), `fill` is the whole slice, and it is filled up.

A chunk ends on a page border unless it is the last of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Slice", "chunk_tokens", "pack_prefills", "would_get_tokens"]


@dataclass(frozen=True, slots=True)
class Slice:
    """Prompt tokens of one step: at most `tokens`, and at least a page, the smallest chunk; others
    join the first prompt up to `fill`."""

    tokens: int
    fill: int
    page_size: int

    def __post_init__(self) -> None:
        assert 0 < self.fill <= self.tokens, f"{self.fill} of {self.tokens} tokens"

    def room(self, taken: int) -> int:
        """Tokens that the next prefill of a step may get behind `taken`."""
        return self.fill - taken if taken else max(self.tokens, self.page_size)


def chunk_tokens(remaining: int, budget: int, page_size: int) -> int:
    """How many of `remaining` tokens, starting on a page border, fit in `budget`; may be 0."""
    return remaining if remaining <= budget else budget // page_size * page_size


def pack_prefills(remaining: Sequence[int], step: Slice, *, oldest_first: bool) -> list[int]:
    """Tokens of this step for each running prefill, given in order of admission.

    `oldest_first`: it is the turn of the one that was admitted first, however long it is. While
    there is a prefill, at least one gets tokens.
    """
    counts = [0] * len(remaining)
    order = sorted(range(len(remaining)), key=lambda i: remaining[i])
    if oldest_first and order:
        order.remove(0)
        order.insert(0, 0)
    taken = 0
    for i in order:
        counts[i] = chunk_tokens(remaining[i], step.room(taken), step.page_size)
        taken += counts[i]
        if taken >= step.fill:
            break
    return counts


def would_get_tokens(remaining: Sequence[int], new: int, step: Slice) -> bool:
    """Would one more prefill of `new` tokens be packed, behind the running ones `remaining`?

    In a step that is not the oldest one's turn.
    """
    return pack_prefills([*remaining, new], step, oldest_first=False)[-1] > 0
