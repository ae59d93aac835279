"""Free pages that are really compared (`--verify-collectives`).

That every rank has room is arithmetic on mirrored free lists: nobody is asked. With the flag each
rank brings to every step what its own copy of the cache has free after the step's record, and all
of them take the least and the most of it. Both must be what the leader's record says.

    record  free pages by pool  ------------------.
    ranks   copy after the record -- MIN over all --+-- equal, or the rank and the pool are named
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phloem.core.errors import GroupError
from phloem.core.group import Group, Reduce

__all__ = ["FreePages", "verify_free_pages"]

_NO_POOL = -1  # of a copy that does not have it


@dataclass(frozen=True, slots=True, kw_only=True)
class FreePages:
    """Free pages by the names of their pools: by the leader's record, by this rank's own copy."""

    said: Mapping[str, int]
    own: Mapping[str, int]


def verify_free_pages(group: Group[Tensor], step: int, free: FreePages) -> None:
    """Compare with all ranks of `group`, each of which calls this before `step`.

    Raises GroupError, on all of them alike, if some rank's copy differs from the record.
    """
    said = torch.tensor(list(free.said.values()), dtype=torch.int64)
    own = torch.tensor([free.own.get(name, _NO_POOL) for name in free.said], dtype=torch.int64)
    bounds = torch.cat((own, -own))  # the least and, negated, the most
    group.all_reduce(bounds, Reduce.MIN)
    if bounds.equal(torch.cat((said, -said))):
        return
    rows = [torch.empty_like(own) for _ in range(group.size)]
    group.all_gather(rows, own)  # all of them have seen it: all come here
    wrong = [at for at, row in enumerate(rows) if not row.equal(said)]
    first = rows[wrong[0]]
    differs = ", ".join(
        f"{int(first[at])} in {list(free.said)[at]} (the leader: {int(said[at])})"
        for at in first.ne(said).nonzero().flatten().tolist()
    )
    whose = "its" if group.rank in wrong else f"rank {group.members[wrong[0]]}'s"
    raise GroupError(
        f"{whose} copy of the cache has other free pages than the leader's at step {step}: "
        f"{differs}",
        ranks=tuple(group.members[at] for at in wrong),
    )
