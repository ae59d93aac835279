"""Prefill packing: which prefills compute how many tokens in this step.

Short ones first, whole; what is left of the budget goes to the longer ones as chunks. A chunk ends
on a page border unless it is the last of its prompt. The prefill that has run longest is promised
a share, so that an endless stream of short prompts cannot stop a long one.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LONGEST_RUNNING_SHARE", "chunk_tokens", "pack_prefills", "would_get_tokens"]

LONGEST_RUNNING_SHARE = 4  # one quarter of the budget


def chunk_tokens(remaining: int, budget: int, page_size: int) -> int:
    """How many of `remaining` tokens, starting on a page border, fit in `budget`; may be 0."""
    return remaining if remaining <= budget else budget // page_size * page_size


def pack_prefills(remaining: Sequence[int], budget: int, page_size: int) -> list[int]:
    """Tokens of this step for each running prefill, given in order of admission.

    The sum is at most `budget`, except that a budget below one page is taken as one page (a page is
    the smallest chunk). While there is a prefill, at least one gets tokens.
    """
    if not remaining:
        return []
    budget = max(budget, page_size)
    counts = [0] * len(remaining)
    counts[0] = chunk_tokens(remaining[0], _share(budget, page_size), page_size)
    budget -= counts[0]
    for i in sorted(range(len(remaining)), key=lambda i: remaining[i]):
        more = chunk_tokens(remaining[i] - counts[i], budget, page_size)
        counts[i] += more
        budget -= more
    return counts


def would_get_tokens(remaining: Sequence[int], new: int, budget: int, page_size: int) -> bool:
    """Would one more prefill of `new` tokens be packed, behind the running ones `remaining`?"""
    budget = max(budget, page_size)
    if remaining:
        share = chunk_tokens(remaining[0], _share(budget, page_size), page_size)
        budget -= share + sum(other for other in remaining[1:] if other <= new)
        if remaining[0] <= new:
            budget -= remaining[0] - share
    return chunk_tokens(new, budget, page_size) > 0


def _share(budget: int, page_size: int) -> int:
    return max(page_size, budget // LONGEST_RUNNING_SHARE)
