"""The ways in which a step attends over remote pages, chosen anew for each step.

All ways are over the same pages and give the same result, so a step may be computed in one and the
next one in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phloem.attention.batch import RaggedBatch
from phloem.attention.layered import LayeredAttention
from phloem.attention.remote import RemoteAttention
from phloem.attention.remote_pages import RankPool
from phloem.core.group import Group
from phloem.core.remote import RemoteWays

__all__ = ["AttentionChoice", "PlannedAttention"]


@dataclass(frozen=True, slots=True)
class PlannedAttention:
    """What a model's `forward` takes as `attention` and `meta`."""

    attention: LayeredAttention | RemoteAttention
    meta: Any


class AttentionChoice:
    """One rank's attention in all ways that its machine can do.

    `direct` reads global page numbers in place where `pools` are parts of memory that all ranks
    map. Without a `group`, which it owns, nothing can travel.
    """

    def __init__(
        self,
        direct: LayeredAttention,
        pools: Sequence[RankPool],
        group: Group[Tensor] | None = None,
    ) -> None:
        self._pools, self._group = tuple(pools), group
        self._remote: RemoteAttention | None = None
        self.replace(direct)

    def replace(self, direct: LayeredAttention) -> None:
        """Attention of other weights over the same pages, from the next plan on."""
        self._direct = direct
        if self._group is not None:
            self._remote = RemoteAttention(direct, self._pools, self._group)

    @property
    def direct(self) -> LayeredAttention:
        """Attention over this rank's pages, and over all others that are mapped."""
        return self._direct

    @property
    def pools(self) -> tuple[RankPool, ...]:
        """This rank's pages, by component."""
        return self._pools

    @property
    def group(self) -> Group[Tensor] | None:
        return self._group

    def close(self) -> None:
        """Leave the group: ranks that wait for this one are told. Idempotent."""
        if self._group is not None:
            self._group.close()

    def plan(
        self, ways: RemoteWays, shares: Sequence[Sequence[RaggedBatch]], *, ahead: bool = True
    ) -> PlannedAttention:
        """`shares` and `ahead` as `RemoteAttention.plan` takes them."""
        if not ways.exchanges:
            return PlannedAttention(self._direct, self._direct.plan(shares[self._pools[0].rank]))
        attention = self._remote
        assert attention is not None, "nothing can travel: this rank is in no group"
        return PlannedAttention(attention, attention.plan(ways, shares, ahead=ahead))
