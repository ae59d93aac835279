"""A row where only some of its pages are: who sees which of its keys."""

from __future__ import annotations

import numpy as np
import pytest

from phloem.attention.batch import RaggedBatch, RowSpan
from phloem.attention.held import held_part, join_held


def keys_of(span: RowSpan, position: int, size: int) -> set[tuple[int, int]]:
    """(page, offset) of all that a query at `position` of a span sees."""
    return {(int(span.slots[p // size - span.base]), p % size) for p in range(position + 1)}


def random_rows(rng: np.random.Generator, size: int) -> RaggedBatch:
    """Rows of consecutive tokens and rows with gaps, on pages of numbers below 1000."""
    spans, first = [], 0
    for _ in range(rng.integers(1, 5)):
        positions = np.sort(rng.choice(60, int(rng.integers(1, 25)), replace=False))
        if rng.integers(2):
            positions = np.arange(positions[0], positions[0] + len(positions))
        slots = rng.permutation(1000)[: int(positions[-1]) // size + 1]
        gaps = positions if rng.integers(2) else None
        if gaps is None:
            positions = np.arange(positions[0], positions[0] + len(positions))
            slots = rng.permutation(1000)[: int(positions[-1]) // size + 1]
        start, count = int(positions[0]), len(positions)
        spans.append(RowSpan(first, start, count, slots, at=gaps))
        first += count
    return RaggedBatch(tuple(spans), size)


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(20))
def test_a_query_sees_the_keys_before_it_that_are_here(size, seed):
    """Parts that together hold all pages show each query all its keys, each once. Red if a query's
    place among what is here is off by one, at a border of pages, or where its own page is here.

    A page whose first token comes after a query's page may be here as well, and is not seen.
    """
    rng = np.random.default_rng(seed)
    batch = random_rows(rng, size)
    seen: list[list[tuple[int, int]]] = [[] for _ in range(batch.num_tokens)]
    for rank in range(3):
        part = held_part(batch, lambda pages, r=rank: pages % 3 == r, lambda pages: pages)
        assert part.batch.num_tokens == len(part.index)
        for span in part.batch.spans:
            at = part.index[span.first : span.first + span.count]
            for token, position in zip(at.tolist(), span.positions().tolist(), strict=True):
                keys = keys_of(span, position, size)
                assert all(page % 3 == rank for page, _ in keys)
                seen[token] += keys
    for span in batch.spans:
        for token, position in enumerate(span.positions().tolist(), span.first):
            # An own page that is here is seen up to the query, the others whole.
            assert sorted(seen[token]) == sorted(keys_of(span, position, size))


def test_consecutive_tokens_of_own_pages_stay_a_plain_span():
    """Then the kernels need no mask: a rank's own pages, side by side, are causal as they are."""
    at = np.array([0, 1, 2, 3, 8, 9, 10, 11])
    batch = RaggedBatch((RowSpan(0, 0, 8, np.array([5, 90, 7]), at=at),), 4)
    (span,) = held_part(batch, lambda pages: pages < 50, lambda pages: pages + 1).batch.spans
    assert (span.start, span.count, span.at, span.slots.tolist()) == (0, 8, None, [6, 8])


def test_a_row_of_which_nothing_is_here_is_left_out():
    spans = (RowSpan(0, 3, 2, np.array([60, 61])), RowSpan(2, 6, 1, np.array([1, 70])))
    part = held_part(RaggedBatch(spans, 4), lambda pages: pages < 50, lambda pages: pages)
    assert part.index.tolist() == [2]
    (span,) = part.batch.spans
    assert (span.first, span.start, span.count) == (0, 3, 1)
    joined = join_held([part.batch, RaggedBatch((), 4), part.batch], 4)
    assert [s.first for s in joined.spans] == [0, 1]
