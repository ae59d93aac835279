"""How ranks that share no memory form their groups, over the store at which they have met.

    here/R       rank R has come: who has not is named before anybody waits for it in a library
    mesh         all ranks: sampled tokens; pages and queries too, where every rank owns pages
    part-P       those that hold part P of the heads of pages: pages and queries
    row-I        those that compute the same tokens: sums

What a group leaves in the store, it leaves under a name of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

from phloem.core.errors import EngineDead, GroupError
from phloem.core.mesh import ShardAxis
from phloem.groups import TorchGroup
from phloem.worker import RankPlace
from phloem.worker.peers import PATIENCE_S, group_place

__all__ = ["Rendezvous", "place_apart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where rank `rank` forms its groups. `store`: of this start alone. `address`: as of
    `TorchGroup.gloo`. `timeout_s`: so long all of them may take together."""

    rank: int
    store: Store
    address: str | None
    timeout_s: float


def place_apart(at: Rendezvous, axis: ShardAxis, max_running: int) -> RankPlace:
    """This rank's place among those of `axis.mesh`; every one of them calls it, and none returns
    before all have. Raises EngineDead if they do not."""
    deadline_s = time.monotonic() + at.timeout_s
    mesh, rank = axis.mesh, at.rank
    _wait_for_all(at, mesh.world, deadline_s)
    made: list[TorchGroup] = []

    def group(name: str, kind: str, ranks: Sequence[int]) -> TorchGroup | None:
        """None where this rank is alone in it."""
        if len(ranks) == 1:
            return None
        made.append(_group(at, name, kind, ranks, deadline_s))
        return made[-1]

    try:
        world = group("mesh", "mesh", range(mesh.world))
        assert world is not None, "one rank alone is apart from nobody"
        part = axis.part_of(rank)
        # In the same order everywhere: who waits in one group must be awaited in no other one.
        parts = None
        if axis.ranks_per_owner > 1:
            parts = group(f"part-{part}", "cp", axis.peers_of(rank))
        row = group(f"row-{mesh.cp_index(rank)}", "tp", mesh.row_of(rank))
    except GroupError as error:
        for each in made:
            each.close()
        raise EngineDead(str(error)) from None
    return group_place(world, axis, max_running, parts=parts, row=row)


def _group(
    at: Rendezvous, name: str, kind: str, ranks: Sequence[int], deadline_s: float
) -> TorchGroup:
    """`kind`: what errors call it."""
    return TorchGroup.gloo(
        PrefixStore(name, at.store),
        rank=ranks.index(at.rank),
        size=len(ranks),
        axis=kind,
        timeout_s=PATIENCE_S,
        members=ranks,
        meet_s=_left_s(deadline_s),
        address=at.address,
    )


def _wait_for_all(at: Rendezvous, size: int, deadline_s: float) -> None:
    keys = {rank: f"here/{rank}" for rank in range(size)}
    try:
        at.store.set(keys[at.rank], "yes")
        for key in keys.values():
            with contextlib.suppress(DistStoreError):
                at.store.wait([key], datetime.timedelta(seconds=_left_s(deadline_s)))
        missing = [rank for rank, key in keys.items() if not at.store.check([key])]
    except RuntimeError as error:
        raise EngineDead(f"the store of the ranks is gone: {_line(error)}") from None
    if missing:
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        have = "has" if len(missing) == 1 else "have"
        raise EngineDead(
            f"{names} {have} not come to form groups for {at.timeout_s:g} s, though the leader had "
            "taken all in; the output of that rank says why"
        )


def _left_s(deadline_s: float) -> float:
    return max(1e-3, deadline_s - time.monotonic())  # 0 would mean: for ever


def _line(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0]
