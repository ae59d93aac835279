"""The progress board: who waits is woken by the post it waits for, and by nothing less."""

from __future__ import annotations

import threading

import pytest

from phloem.core.errors import GroupError
from phloem.groups.progress import Progress, progress_seats


@pytest.fixture
def boards():
    made = [Progress(seat) for seat in progress_seats(3)]
    yield made
    for board in made:
        board.close()


def test_a_waiter_passes_only_when_its_layer_was_posted(boards) -> None:
    """Lock-step over 300 layers: red if a wake-up is lost, or a wait returns too early."""
    seen: list[bool] = []

    def follow() -> None:
        for step in range(100):
            for layer in range(3):
                boards[1].wait_for(0, step, layer, 60)
                seen.append(boards[1].read(0) >= (step, layer))
                boards[1].post(step, layer)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    for step in range(100):
        for layer in range(3):
            boards[0].post(step, layer)
            boards[0].wait_for(1, step, layer, 60)
    thread.join(60)
    assert seen == [True] * 300


def test_later_progress_passes_and_earlier_does_not(boards) -> None:
    assert boards[2].read(0) is None
    boards[0].post(4, 2)
    assert boards[2].read(0) == (4, 2)
    boards[2].wait_for(0, 4, 2, 0)
    boards[2].wait_for(0, 3, 9, 0)
    with pytest.raises(GroupError, match=r"rank 0 is late.*step 4, layer 3.*\(4, 2\)"):
        boards[2].wait_for(0, 4, 3, 0)


def test_a_rank_that_has_gone_is_an_error_at_once_but_its_posts_count(boards) -> None:
    boards[0].post(1, 1)
    boards[0].close()
    boards[1].wait_for(0, 1, 1, 60)
    with pytest.raises(GroupError, match="rank 0 is gone") as caught:
        boards[1].wait_for(0, 1, 2, 60)
    assert caught.value.ranks == (0,)
