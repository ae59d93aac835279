"""Free pages that all ranks really compare: what is compared, and who is named."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from phloem.core.errors import GroupError
from phloem.core.group import OpKind
from phloem.groups import LocalGroup, local_groups
from phloem.worker.verify import FreePages, verify_free_pages

SAID = {"pages of owner 0": 7, "pages of owner 1": 0, "host pages": 30}


def compare(groups: list[LocalGroup], copies: list[dict[str, int]]) -> list[GroupError | None]:
    """What each rank says of step 4."""

    def one(rank: int) -> GroupError | None:
        try:
            verify_free_pages(groups[rank], 4, FreePages(said=SAID, own=copies[rank]))
        except GroupError as error:
            return error
        return None

    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(one, range(len(groups))))


def test_equal_copies_cost_one_reduction() -> None:
    """Of 16 bytes a pool to each other rank, and no message more."""
    groups = local_groups(4)
    assert compare(groups, [SAID] * 4) == [None] * 4
    for group in groups:
        traffic = group.traffic()
        assert traffic[OpKind.ALL_REDUCE].calls == 1
        assert traffic[OpKind.ALL_REDUCE].bytes_sent == 3 * 16 * len(SAID)
        assert traffic[OpKind.ALL_GATHER].calls == 0


@pytest.mark.parametrize("drift", [-1, 1])
@pytest.mark.parametrize("pool", SAID)
def test_o27_one_page_on_one_rank_is_noticed_by_all(pool: str, drift: int) -> None:
    """One too few shows in the minimum; one too many only in that of the negated numbers."""
    copies = [SAID, SAID, {**SAID, pool: SAID[pool] + drift}, SAID]
    errors = compare(local_groups(4), copies)
    for rank, error in enumerate(errors):
        assert error is not None, f"rank {rank} went on"
        assert error.ranks == (2,)
        whose = "its" if rank == 2 else "rank 2's"
        assert str(error) == (
            f"{whose} copy of the cache has other free pages than the leader's at step 4: "
            f"{SAID[pool] + drift} in {pool} (the leader: {SAID[pool]})"
        )


def test_a_rank_is_named_by_its_number_among_all() -> None:
    """Of two rows of two, ranks 1 and 3 are a group. Red if it is named by its place there: it
    would not know itself, and blame another one."""
    groups = local_groups(2, members=(1, 3))
    errors = compare(groups, [SAID, {**SAID, "host pages": 31}])
    assert [error is not None and error.ranks for error in errors] == [(3,), (3,)]
    assert str(errors[0]).startswith("rank 3's copy of the cache")
    assert str(errors[1]).startswith("its copy of the cache")


def test_a_copy_without_a_pool_is_another_copy() -> None:
    errors = compare(local_groups(2), [SAID, {"pages of owner 0": 7, "host pages": 30}])
    assert [error is not None and error.ranks for error in errors] == [(1,), (1,)]
