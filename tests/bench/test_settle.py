"""A sample begins only when both servers are at rest."""

from __future__ import annotations

import asyncio
import os

from phloem.bench.compare.settle import cpu_seconds, until_idle


def waits(readings: list[float]) -> tuple[bool, int]:
    """What `until_idle` makes of these readings, and how often it paused."""
    source, pauses = iter(readings), []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    return asyncio.run(until_idle(lambda: next(source), pause)), len(pauses)


def test_it_waits_as_long_as_a_server_computes():
    assert waits([5.0, 5.5, 6.0, 6.01]) == (True, 3)


def test_servers_at_rest_cost_one_window():
    assert waits([5.0, 5.0]) == (True, 1)


def test_a_server_that_never_rests_does_not_stop_the_bench():
    assert waits([float(second) for second in range(100)])[0] is False


def test_cpu_time_of_this_process_grows_and_of_none_is_nothing():
    before = cpu_seconds([os.getpid()])
    while cpu_seconds([os.getpid()]) <= before:
        sum(range(10_000))
    assert cpu_seconds([2**22 + 1]) == 0.0
