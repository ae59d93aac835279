"""Sampled tokens between ranks that share no memory."""

from __future__ import annotations

import pytest

from phloem.core.errors import GroupError
from phloem.core.group import OpKind
from phloem.core.plan import RowPlan
from phloem.groups import local_groups
from phloem.worker.group_peers import GroupPeers
from phloem.worker.sampled import SampledTokens
from tests.contract.test_groups import in_threads

ROWS = 6


def row(number: int, index: int = 0) -> RowPlan:
    return RowPlan(
        row=number,
        serial=10 + number,
        start=5,
        count=1,
        tokens=None,
        sample=True,
        output_index=index,
    )


def test_every_rank_has_every_token_when_the_next_step_begins() -> None:
    """In one message from who sampled to each other one, and none from who did not. Red if a token
    is missed, or taken for another sample of its row."""
    groups, copies = local_groups(3), [SampledTokens(ROWS) for _ in range(3)]
    peers = [GroupPeers(group, mine) for group, mine in zip(groups, copies, strict=True)]
    steps = [
        ([row(0), row(3), row(5)], [1, 0, 1]),
        ([], []),
        ([row(3, 1)], [2]),
    ]

    def play(rank: int) -> list[list[int | None]]:
        seen = []
        for step, (sampled, by) in enumerate(steps):
            peers[rank].begin(step)
            for plan, who in zip(sampled, by, strict=True):
                if who == rank:
                    copies[rank].put(plan, 100 * step + plan.row)
            peers[rank].finished(step, sampled, by)
            peers[rank].begin(step + 1)
            seen.append([copies[rank].find(plan) for plan in sampled])
        assert copies[rank].find(row(3)) is None  # a later one has come
        return seen

    assert in_threads(3, play) == [[[0, 3, 5], [], [203]]] * 3
    for group, messages in zip(groups, (2, 2, 2), strict=True):
        sent = group.traffic()[OpKind.ALL_GATHER]
        assert (sent.calls, sent.messages_sent) == (2, messages)
    assert groups[1].traffic()[OpKind.ALL_GATHER].bytes_sent == 2 * 2 * 16  # two rows, two ranks


def test_a_rank_that_is_gone_is_an_error_of_the_next_step() -> None:
    groups = local_groups(2)
    peers = GroupPeers(groups[0], SampledTokens(ROWS))
    peers.begin(0)
    peers.finished(0, [row(1)], [1])
    groups[1].close()
    with pytest.raises(GroupError, match="rank 1 of cp is gone"):
        peers.begin(1)
