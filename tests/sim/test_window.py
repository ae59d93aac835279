"""The window memory must notice what it is there to notice, and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from phloem.core.plan import RowPlan
from phloem.sim.window import FakeWindow, WindowMemory

IDS = np.arange(100, 400, dtype=np.int32)


class Request:
    """One row over a memory of its own pages, page i in slot i unless told otherwise."""

    def __init__(self, *, window: int, layers: int, page_size: int, num_pages: int = 64) -> None:
        self.memory = WindowMemory(
            FakeWindow(tokens=window, layers=layers, num_pages=num_pages), page_size
        )
        self.page_size = page_size
        self.table = np.arange(num_pages * page_size, dtype=np.int64)

    def compute(self, start: int, count: int, **plan) -> str | None:
        row = RowPlan(
            row=0,
            serial=0,
            start=start,
            count=count,
            tokens=b"",
            sample=plan.pop("sample", False),
            **plan,
        )
        return self.memory.compute(self.table, IDS[: start + count], row)

    def free(self, *pages: int) -> None:
        self.memory.free(np.array(pages, dtype=np.int64))


def layered(window: int, layers: int, length: int, *, known_from: int) -> list[int]:
    """Of how many layers the outputs are right at each position from `known_from` on.

    Layer by layer, an output is a hash of all that it reads; what lies before cannot be read.
    """
    ids = [("id", q) for q in range(length)]
    cold, warm = [ids], [ids]
    for layer in range(layers):
        reads = [range(max(0, q - window + 1), q + 1) for q in range(length)]
        cold.append([hash((layer, *(cold[-1][k] for k in read))) for read in reads])
        seen = [value if q >= known_from else "junk" for q, value in enumerate(warm[-1])]
        warm.append([hash((layer, *(seen[k] for k in read))) for read in reads])
    right = []
    for q in range(known_from, length):
        same = [warm[layer][q] == cold[layer][q] for layer in range(1, layers + 1)]
        right.append(same.index(False) if False in same else layers)
    return right


@pytest.mark.parametrize("seed", range(60))
def test_rightness_is_that_of_a_model_with_layers(seed: int):
    """After a restart at any position, in chunks of any size, against hashes layer by layer."""
    rng = random.Random(seed)
    window, layers, page_size = rng.choice((1, 2, 4, 7)), rng.randrange(1, 5), rng.choice((1, 4, 8))
    start = rng.randrange(1, 20)
    length = start + rng.randrange(1, 40)
    request = Request(window=window, layers=layers, page_size=page_size)
    position = start
    while position < length:
        count = rng.randrange(1, length - position + 1)
        fault = request.compute(position, count, window_from=start, write_from=length)
        assert fault is None
        position += count
    got = request.memory.cells.reshape(-1)[start:length] >> 55
    assert got.tolist() == layered(window, layers, length, known_from=start)


def test_a_restart_is_low_enough_or_it_is_told():
    """Ls x (W - 1) positions before what is sampled: one fewer is not right in all layers."""
    for window, layers in [(4, 1), (4, 3), (9, 2), (2, 4)]:
        for start in range(5, 40):
            request = Request(window=window, layers=layers, page_size=4)
            assert request.compute(start, 40 - start, window_from=start, write_from=40) is None
            fault = request.compute(40, 1, window_from=start, write_from=40, sample=True)
            assert (fault is None) == (start <= 40 - layers * (window - 1)), (start, fault)


def test_full_state_that_is_not_right_is_never_written():
    request = Request(window=4, layers=2, page_size=4)
    assert request.compute(8, 4, window_from=8, write_from=20) is None
    assert "right in" in request.compute(8, 4, window_from=8, write_from=11)


def test_reading_what_was_freed_never_written_or_is_not_there():
    request = Request(window=8, layers=2, page_size=4)
    assert request.compute(0, 16) is None
    request.free(1)  # positions 4 ... 7: behind the window of position 16
    assert request.compute(16, 4) is None
    request.free(4)
    assert "position 16 is not in its window page" in request.compute(20, 1)
    request.table[16:20] = -1
    assert "position 16 has no window page" in request.compute(20, 1)


def test_another_requests_page_is_noticed():
    request = Request(window=8, layers=2, page_size=4)
    assert request.compute(0, 16) is None
    request.table[8:12], request.table[12:16] = request.table[12:16], request.table[8:12].copy()
    assert "position 9 is not" in request.compute(16, 4)


def test_right_state_is_not_overwritten_by_what_a_restart_makes():
    """Pages of the tree are shared: a restart must write to pages of its own."""
    request = Request(window=4, layers=2, page_size=4)
    assert request.compute(0, 16) is None
    assert "overwritten" in request.compute(8, 8, window_from=8, write_from=16)


def test_a_window_of_one_token_reads_nothing_else():
    request = Request(window=1, layers=3, page_size=4)
    assert request.compute(0, 8) is None
    request.free(0, 1)
    assert request.compute(8, 1, sample=True) is None
