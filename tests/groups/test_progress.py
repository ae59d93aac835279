"""The progress board: who waits is woken by the post it waits for, and by nothing less."""

from __future__ import annotations

import threading

import pytest

from phloem.core.errors import GroupError
from phloem.groups import LAST_LAYER, ShmProgress, local_progress, progress, progress_seats


@pytest.fixture(params=["shm", "threads"])
def boards(request):
    seats = progress_seats(3) if request.param == "shm" else []
    made = [ShmProgress(seat) for seat in seats] or local_progress(3)
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


def test_a_rank_is_late_only_if_it_does_not_move(boards, monkeypatch) -> None:
    """It moves five times, always before patience ends: red if that counts from the first look."""
    clock, moves = [0.0], []

    def sleep(_rank: int, _wanted: int, _timeout_s: float) -> None:
        clock[0] += 6.0
        if len(moves) < 5 and boards[0].read(0) != (6, len(moves) + 1):
            boards[0].post(6, len(moves) + 1)

    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    boards[0].post(6, 0)
    boards[1].on_move, boards[1]._sleep = lambda: moves.append(1), sleep
    with pytest.raises(GroupError, match=r"late: waited for the end of step 7.*\(6, 5\)"):
        boards[1].wait_for(0, 7, LAST_LAYER, 10.0)
    assert len(moves) == 5


def test_a_post_wakes_only_the_process_that_waits_for_it() -> None:
    """Rank 2 sleeps for rank 0's layer 5: what comes before, and what others post, is no bell."""
    boards = [ShmProgress(seat) for seat in progress_seats(3)]
    boards[2]._whom[2], boards[2]._wanted[2] = 0, boards[2]._at[0] + 6
    boards[2]._sleeping[2] = 1
    for layer in range(5):
        boards[0].post(0, layer)
    boards[1].post(9, 9)
    assert not boards[2]._bells._poll.poll(0)
    boards[0].post(0, 5)
    assert boards[2]._bells._poll.poll(0)
    for board in boards:
        board.close()
