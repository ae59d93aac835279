"""PageRef: the global address of a page, (owner, slot) packed in one int64.

bit 63      62 ............ 40   39 ................ 0
    0     | owner (23 bits)    | slot (40 bits)       |

`owner` is an index on the shard axis, `slot` the index of the page in that owner's pool.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "NO_REFS",
    "PageRef",
    "PageRefs",
    "flat_slots",
    "make_ref",
    "owner_of",
    "owners_of",
    "slot_of",
    "slots_of",
]

PageRef: TypeAlias = int
PageRefs: TypeAlias = npt.NDArray[np.int64]

_SLOT_BITS = 40
_SLOT_MASK = (1 << _SLOT_BITS) - 1

NO_REFS: PageRefs = np.empty(0, dtype=np.int64)
NO_REFS.setflags(write=False)


def make_ref(owner: int, slot: int) -> PageRef:
    """Pack an owner and a slot."""
    return (owner << _SLOT_BITS) | slot


def owner_of(ref: PageRef) -> int:
    """The rank (on the shard axis) whose pool holds the page."""
    return ref >> _SLOT_BITS


def slot_of(ref: PageRef) -> int:
    """The page's index in its owner's pool."""
    return ref & _SLOT_MASK


def slots_of(refs: PageRefs) -> PageRefs:
    """The slots of many refs, as int64 (n,)."""
    return refs & _SLOT_MASK


def owners_of(refs: PageRefs) -> PageRefs:
    """The owners of many refs, as int64 (n,)."""
    return refs >> _SLOT_BITS


def flat_slots(refs: PageRefs, pages_per_owner: int) -> PageRefs:
    """Where pages lie when the pools of all owners, of equal size, stand side by side: int64 (n,).

    With one owner these are the slots.
    """
    return (refs >> _SLOT_BITS) * pages_per_owner + (refs & _SLOT_MASK)
