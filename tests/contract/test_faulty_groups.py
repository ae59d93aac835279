"""Groups with a rank that behaves badly: the others get the right bytes, or an error in time."""

from __future__ import annotations

import pytest

from phloem.core.errors import GroupError
from phloem.groups.faulty import FaultyGroup
from tests.contract.test_groups import KINDS, Script, in_threads, make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "seed"), [(2, 21), (3, 22)])
def test_ranks_that_come_late_change_no_byte(kind, size, seed) -> None:
    groups = [FaultyGroup(g, seed=seed * 10 + g.rank) for g in make(kind, size)]
    script = Script(seed, size, 60)
    try:
        in_threads(size, lambda rank: script.play(groups[rank], lead=2))
        assert len({group.operations.digest for group in groups}) == 1
    finally:
        for group in groups:
            group.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [31, 32, 33])
def test_a_rank_that_leaves_in_mid_work_stops_all(kind, seed) -> None:
    """O-27: nobody hangs; every rank ends with an error, long before the deadline."""
    groups = [
        FaultyGroup(g, seed=seed + g.rank, leave_after=20 if g.rank == 1 else None)
        for g in make(kind, 3)
    ]
    script = Script(seed, 3, 60)

    def main(rank: int) -> None:
        try:
            with pytest.raises(GroupError):
                script.play(groups[rank], lead=2)
        finally:
            groups[rank].close()  # as its process would: the next one sees it

    in_threads(3, main)
