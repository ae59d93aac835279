"""Groups: the ranks along one axis of the mesh, and what they may do together.

Sizes are never asked for on the way: who calls a receiving operation brings tensors of the right
size, because the leader has planned them. Every operation is begun and finished; between the two
the tensors belong to the group (read what is sent, touch nothing that is received). Operations are
matched by their order: the n-th of one rank belongs to the n-th of every other. A rank that does
another operation, or the same with other sizes, has *diverged* and is named; rank 0 is the leader
and right by definition.

After a GroupError the group is unusable: every later call raises it again.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import xxhash

__all__ = ["Group", "OpKind", "Operations", "Pending", "Reduce", "Tally"]

TensorT = TypeVar("TensorT", contravariant=True)


class OpKind(enum.IntEnum):
    """The operations that are counted and compared."""

    BARRIER = 0
    BROADCAST = 1
    ALL_GATHER = 2
    ALL_TO_ALL = 3
    ALL_REDUCE = 4
    VERIFY = 5


class Reduce(enum.IntEnum):
    """How `all_reduce` folds, in rank order, so that every rank gets the same bits."""

    SUM = 0
    MIN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What one rank did with one kind of operation.

    A message is what one operation carries from this rank to one other; one without bytes counts
    only in a barrier, which is nothing else. What stays on the rank is never counted.
    """

    calls: int = 0
    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            calls=self.calls + other.calls,
            messages_sent=self.messages_sent + other.messages_sent,
            bytes_sent=self.bytes_sent + other.bytes_sent,
            messages_received=self.messages_received + other.messages_received,
            bytes_received=self.bytes_received + other.bytes_received,
        )


class Operations:
    """The rolling hash over the operations that one rank has begun.

    Two ranks with the same `count` and `digest` have begun the same operations in the same order.
    What a rank knows alone (its splits of an all_to_all) stays out of the hash.
    """

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0

    def note(self, kind: OpKind, *facts: int) -> int:
        """Add one operation; the new digest (63 bits, so that it fits an int64)."""
        packed = struct.pack(f"<{len(facts) + 2}q", self.digest, kind, *facts)
        self.count += 1
        self.digest = xxhash.xxh64_intdigest(packed, seed=self.count) >> 1
        return self.digest


class Pending(Protocol):
    """An operation that was begun."""

    def finish(self, timeout_s: float | None = None) -> None:
        """Return when what was to be received is there and what was sent may be written again.

        May be called in any order and more than once. `timeout_s` counts from this call; None
        takes the group's. Raises GroupError if a peer is gone, late, or has diverged.
        """
        ...


class Group(Protocol[TensorT]):
    """The ranks along one axis. One thread per rank calls it. All tensors are contiguous.

    `out[r]` receives from rank r and has the size that rank r sends; sizes may differ and be zero,
    and `out[rank]` receives what this rank sends to itself.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def axis(self) -> str:
        """The axis of the mesh: `cp`, `tp`, ..."""
        ...

    @property
    def members(self) -> Sequence[int]:
        """The numbers by which errors name its ranks: those that they have among all."""
        ...

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when every rank has come here."""
        ...

    def broadcast(self, tensor: TensorT, root: int, timeout_s: float | None = None) -> None:
        """The root's bytes, into every rank's `tensor`."""
        ...

    def all_gather(
        self, out: Sequence[TensorT], tensor: TensorT, timeout_s: float | None = None
    ) -> None:
        """Every rank's `tensor` into every rank's `out`."""
        ...

    def all_to_all(
        self, out: Sequence[TensorT], parts: Sequence[TensorT], timeout_s: float | None = None
    ) -> None:
        """`parts[r]` goes to rank r."""
        ...

    def all_reduce(self, tensor: TensorT, how: Reduce, timeout_s: float | None = None) -> None:
        """Fold every rank's `tensor` in place."""
        ...

    def begin_broadcast(self, tensor: TensorT, root: int) -> Pending: ...

    def begin_all_gather(self, out: Sequence[TensorT], tensor: TensorT) -> Pending: ...

    def begin_all_to_all(self, out: Sequence[TensorT], parts: Sequence[TensorT]) -> Pending: ...

    def begin_all_reduce(self, tensor: TensorT, how: Reduce) -> Pending: ...

    def verify(self, timeout_s: float | None = None) -> None:
        """Compare the operations of all ranks; GroupError names those that differ from rank 0."""
        ...

    def traffic(self) -> Mapping[OpKind, Tally]:
        """What this rank has sent and received since it was made, exactly."""
        ...

    def close(self) -> None:
        """Leave: peers that wait for this rank are told at once. Idempotent."""
        ...
