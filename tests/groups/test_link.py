"""A simulated link: bytes take time, one after the other, and results are those of the inside."""

from __future__ import annotations

import torch

from phloem.groups import Link, LinkedGroup, local_groups


class FakeTime:
    """Moves on only where somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def pair(link: Link) -> tuple[LinkedGroup, LinkedGroup, FakeTime]:
    clock = FakeTime()
    one, two = (
        LinkedGroup(group, link, now=clock.now, sleep=clock.sleep)
        for group in local_groups(2, timeout_s=20)
    )
    return one, two, clock


def test_two_operations_share_the_line_and_a_late_finish_waits_no_more() -> None:
    """Red if the line is not kept busy, if own bytes count, or if waiting starts at `finish`."""
    one, two, clock = pair(Link(latency_s=0.5, bytes_s=1000.0))
    ours = [torch.zeros(4000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)]
    theirs = [torch.full((4000,), 7, dtype=torch.uint8), torch.full((1000,), 8, dtype=torch.uint8)]
    flights = []
    for mine, sent in zip(ours, theirs, strict=True):
        nothing = torch.zeros(0, dtype=torch.uint8)
        flights.append(one.begin_all_to_all([nothing, mine], [nothing, nothing]))
        two.begin_all_to_all([nothing, nothing], [sent, nothing])
    flights[0].finish()
    assert clock.slept == [4.5]
    clock.now_s += 1.0  # computing meanwhile
    flights[1].finish()
    assert clock.slept == [4.5, 0.5]  # 1.5 s on the line behind the first one
    assert [int(mine[0]) for mine in ours] == [7, 8]
    clock.now_s += 10.0
    flights[1].finish()
    assert len(clock.slept) == 2


def test_a_free_link_and_an_empty_message_cost_nothing() -> None:
    for link, size in ((Link(), 1000), (Link(latency_s=9.0, bytes_s=1.0), 0)):
        one, two, clock = pair(link)
        got, nothing = torch.zeros(size, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)
        flight = one.begin_all_to_all([nothing, got], [nothing, nothing])
        two.begin_all_to_all([nothing, nothing], [torch.ones_like(got), nothing])
        flight.finish()
        assert clock.slept == []
        assert int(got.sum()) == size
