"""What a rank's process is told where it shares no memory with the others: how they meet.

    store      a file in a folder that only this user may enter: who may read it may join
    loopback   messages between CPUs, to ports of which the file knows
    pages      a connection to the leader, which moves pages of tiers over it

GPUs find each other by what they leave in the store as well.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch._C._distributed_c10d import FileStore

from phloem.core.mesh import Mesh, ShardAxis
from phloem.engine.apart import LOOPBACK, Rendezvous, place_apart
from phloem.worker import RankPlace

__all__ = ["ApartSeat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApartSeat:
    """Rank `rank` of `axis`, as `RankSeat`. `folder`: where the store is. `pages`: a descriptor;
    -1: it is the leader."""

    FLAG: ClassVar[str] = "--apart"

    rank: int
    axis: ShardAxis
    folder: str
    pages: int = -1

    @property
    def fds(self) -> tuple[int, ...]:
        return () if self.pages < 0 else (self.pages,)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ApartSeat:
        fields = json.loads(text)
        axis = fields["axis"]
        return cls(**(fields | {"axis": ShardAxis(**(axis | {"mesh": Mesh(**axis["mesh"])}))}))

    def take(self, device: str, max_running: int, timeout_s: float) -> RankPlace:
        """Meet the other ranks. Raises EngineDead if they are not all there within `timeout_s`."""
        at = Rendezvous(
            rank=self.rank,
            store=FileStore(str(Path(self.folder) / "store"), -1),
            address=LOOPBACK,
            timeout_s=timeout_s,
            device=device,
        )
        return place_apart(at, self.axis, max_running)
