"""The other ranks of a step, as one rank's runner sees them.

    begin(s)        all have finished step s - 1: pages that it freed may be written again, and the
                    tokens that it sampled are there
    written(s, l)   this rank has written its pages of layer l; returns when all have
    finished(s)     this rank reads no page of step s any more

A rank that has nothing to compute in a step finishes it at once, and nobody waits for its layers.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from phloem.core.group import Group
from phloem.core.mesh import ShardAxis
from phloem.core.plan import RowPlan
from phloem.groups import LAST_LAYER, Progress
from phloem.models.shard import Shard
from phloem.transfer import PageLink
from phloem.worker.group_peers import GroupPeers
from phloem.worker.sampled import SampledTokens

__all__ = ["PATIENCE_S", "Peers", "RankPlace", "group_place"]

# A rank that posts no layer for so long has hung. One that has died is noticed at once.
PATIENCE_S = 120.0


def _nothing() -> None:
    """Nothing has to be done."""


class Peers:
    """Over a board of progress, which it owns. Belongs to the thread that runs the steps."""

    def __init__(self, board: Progress, *, patience_s: float = PATIENCE_S) -> None:
        self._board = board
        self._patience_s = patience_s
        self._others = tuple(r for r in range(board.size) if r != board.rank)
        self._last_step = -1  # that this rank has finished

    @property
    def rank(self) -> int:
        return self._board.rank

    def tell(self, on_move: Callable[[], None]) -> None:
        """Call `on_move` now and then while this rank waits for others that go on."""
        self._board.on_move = on_move

    def moved(self, rank: int) -> object:
        """Differs from what it was as long as `rank` goes on. Any thread may ask."""
        try:
            return self._board.read(rank)
        except ValueError:  # released: this rank has left meanwhile
            return None

    def begin(self, step: int) -> None:
        """Return when every rank has finished the step before. GroupError if one will not."""
        assert step > self._last_step, f"step {step} after step {self._last_step}"
        if self._last_step >= 0:
            self._await(self._last_step, LAST_LAYER)

    def written(self, step: int, layer: int) -> None:
        """This rank's pages of `layer` may be read; return when those of all others may."""
        self._board.post(step, layer)
        self._await(step, layer)

    def post(self, step: int, layer: int) -> None:
        """The same, of a rank that reads none."""
        self._board.post(step, layer)

    def finished(
        self,
        step: int,
        sampled: Sequence[RowPlan] = (),  # noqa: ARG002
        by: Sequence[int] = (),  # noqa: ARG002
    ) -> None:
        """This rank is done with `step`. Who has sampled what in it, all see by themselves."""
        self._board.post(step, LAST_LAYER)
        self._last_step = step

    def leave(self) -> None:
        """Others that wait for this rank are told. Idempotent."""
        self._board.close()

    def _await(self, step: int, layer: int) -> None:
        for rank in self._others:
            self._board.wait_for(rank, step, layer, self._patience_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a worker stands among several: its peers, and the memory that it shares with them.

    `axis`: the owners of pages, of which this rank is one or a part of one. `pools`: of each
    component, `DevicePool.shared_bytes`; None: this rank has memory of its own alone, and what is
    in others' can only travel. `sampled`: `SampledTokens.num_bytes`, which `peers` keep the same on
    all ranks. `group`: one rank of each owner, for pages and queries that travel. `row`: the ranks
    that compute the same tokens; None: this one alone. Who loads the worker owns the groups.
    `links`: over which the leader moves pages of tiers, where they are not in memory that it maps:
    its own end of each other rank's, in their order; of another rank, its end.

    `give_up`: called from any thread when no step need end any more. `on_leave`: called when this
    rank has left, perhaps more than once.
    """

    peers: Peers | GroupPeers
    axis: ShardAxis
    pools: tuple[mmap.mmap, ...] | None
    sampled: mmap.mmap
    group: Group[Tensor] | None = None
    row: Group[Tensor] | None = None
    links: tuple[PageLink, ...] = ()
    give_up: Callable[[], None] = _nothing
    on_leave: Callable[[], None] = _nothing

    @property
    def owner(self) -> int:
        """Whose pages this rank writes."""
        return self.axis.owner_of(self.peers.rank)

    @property
    def shard(self) -> Shard:
        """The part of the model that this rank computes."""
        mesh = self.axis.mesh
        return Shard(mesh.tp_index(self.peers.rank), mesh.tp)

    def leave(self) -> None:
        """Of no use any more: others that wait for this rank are told. Idempotent."""
        self.peers.leave()
        for group in (self.group, self.row):
            if group is not None:
                group.close()
        for link in self.links:
            link.close()
        self.on_leave()


def group_place(
    world: Group[Tensor],
    axis: ShardAxis,
    max_running: int,
    *,
    parts: Group[Tensor] | None = None,
    row: Group[Tensor] | None = None,
) -> RankPlace:
    """Of a rank that shares no memory with any other one. Takes over the groups.

    `world`: all ranks, in order. `parts`: those that hold the same heads as this one, of each owner
    one; None: nobody else does, or, where every rank is an owner, all of them do. `row`: as of
    `RankPlace`.
    """
    assert world.size == axis.mesh.world, f"{world.size} ranks of {axis.mesh.world}"
    assert (row is None) == (axis.mesh.tp == 1), f"a row of {axis.mesh.tp}"
    group = world if axis.size == world.size else parts
    assert (group is None) == (axis.size == 1), f"{axis.size} owners"
    sampled = mmap.mmap(-1, SampledTokens.num_bytes(max_running))
    peers = GroupPeers(world, SampledTokens(max_running, sampled))
    return RankPlace(peers=peers, axis=axis, pools=None, sampled=sampled, group=group, row=row)
