"""What all groups share: checks, counters, the hash of operations, folding.

A subclass moves an `Exchange`, to which every operation comes down: at most one message to each
other rank and at most one from each.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phloem.core.errors import GroupError
from phloem.core.group import Operations, OpKind, Reduce, Tally

__all__ = ["BaseGroup", "Exchange", "Flight", "as_bytes"]

DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """One operation of one rank. `sends[r]`, `recvs[r]`: to and from rank r; None: no message."""

    serial: int
    kind: OpKind
    digest: int  # of all operations up to this one
    sends: tuple[Tensor | None, ...]
    recvs: tuple[Tensor | None, ...]
    same: bool  # every receiver gets the same tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8 (n,)."""
    return tensor.detach().view(-1).view(torch.uint8)


def _nothing() -> None:
    return None


class Flight:
    """An operation in flight. Holds the tensors until it is finished."""

    __slots__ = ("_after", "_exchange", "_group", "_over")

    def __init__(
        self, group: BaseGroup, exchange: Exchange | None, after: Callable[[], None]
    ) -> None:
        self._group = group
        self._exchange = exchange
        self._after = after
        self._over = exchange is None

    def finish(self, timeout_s: float | None = None) -> None:
        """See `Pending.finish`."""
        if not self._over:
            assert self._exchange is not None
            self._group.complete(self._exchange, timeout_s)
            self._after()
            self._over = True
            self._exchange = None
            self._after = _nothing


class BaseGroup(abc.ABC):
    """A `Group` of torch tensors over an exchange that the subclass carries out."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        axis: str,
        timeout_s: float,
        members: Sequence[int] = (),
    ) -> None:
        """`members`: the numbers by which errors name its ranks; none: 0 ... size - 1."""
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size}")
        self.rank = rank
        self.size = size
        self.axis = axis
        self.timeout_s = timeout_s
        self.members = tuple(members) or tuple(range(size))
        self.operations = Operations()
        self._tally = {kind: Tally() for kind in OpKind}
        self._failure: GroupError | None = None
        self._others = tuple(r for r in range(size) if r != rank)

    # -- what a subclass does

    @abc.abstractmethod
    def _launch(self, exchange: Exchange) -> None:
        """Start it without waiting for anybody."""

    @abc.abstractmethod
    def _complete(self, exchange: Exchange, deadline_s: float) -> None:
        """Wait until it is done, at most to `deadline_s` of the monotonic clock, else `late`."""

    @abc.abstractmethod
    def _digest_of(self, rank: int, serial: int) -> int | None:
        """What is known, without asking, of the digest of `rank` at its operation `serial`."""

    @abc.abstractmethod
    def close(self) -> None:
        """See `Group.close`."""

    # -- operations

    def barrier(self, timeout_s: float | None = None) -> None:
        empty = torch.empty(0, dtype=torch.uint8)
        row: list[Tensor | None] = [None if r == self.rank else empty for r in range(self.size)]
        self._begin(OpKind.BARRIER, (), row, row).finish(timeout_s)

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float | None = None) -> None:
        self.begin_broadcast(tensor, root).finish(timeout_s)

    def all_gather(
        self, out: Sequence[Tensor], tensor: Tensor, timeout_s: float | None = None
    ) -> None:
        self.begin_all_gather(out, tensor).finish(timeout_s)

    def all_to_all(
        self, out: Sequence[Tensor], parts: Sequence[Tensor], timeout_s: float | None = None
    ) -> None:
        self.begin_all_to_all(out, parts).finish(timeout_s)

    def all_reduce(self, tensor: Tensor, how: Reduce, timeout_s: float | None = None) -> None:
        self.begin_all_reduce(tensor, how).finish(timeout_s)

    def begin_broadcast(self, tensor: Tensor, root: int) -> Flight:
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is not one of {self.size} ranks")
        sends: list[Tensor | None] = [None] * self.size
        recvs: list[Tensor | None] = [None] * self.size
        if root == self.rank:
            sends = [None if r == root else tensor for r in range(self.size)]
        else:
            recvs[root] = tensor
        return self._begin(OpKind.BROADCAST, (root, tensor.nbytes), sends, recvs)

    def begin_all_gather(self, out: Sequence[Tensor], tensor: Tensor) -> Flight:
        return self._begin_gather(OpKind.ALL_GATHER, out, tensor)

    def begin_all_to_all(self, out: Sequence[Tensor], parts: Sequence[Tensor]) -> Flight:
        self._check_row(parts, "parts")
        self._check_row(out, "out")
        mine = parts[self.rank]
        self._keep(out[self.rank], mine)
        sends: list[Tensor | None] = [*parts]
        recvs: list[Tensor | None] = [*out]
        sends[self.rank] = recvs[self.rank] = None
        return self._begin(OpKind.ALL_TO_ALL, (), sends, recvs, same=False)

    def begin_all_reduce(self, tensor: Tensor, how: Reduce) -> Flight:
        out = [tensor if r == self.rank else torch.empty_like(tensor) for r in range(self.size)]

        def fold() -> None:
            tensor.copy_(_folded(out, how))

        return self._begin_gather(OpKind.ALL_REDUCE, out, tensor, after=fold, facts=(how,))

    def verify(self, timeout_s: float | None = None) -> None:
        state = [self.operations.count, self.operations.digest]
        mine = torch.tensor(state, dtype=torch.int64)
        out = [torch.empty_like(mine) for _ in range(self.size)]
        self._begin_gather(OpKind.VERIFY, out, mine).finish(timeout_s)
        states = [tuple(row.tolist()) for row in out]
        wrong = tuple(r for r, other in enumerate(states) if other != states[0])
        if wrong:
            raise self._fail(self._diverged(wrong, states[0][0]))

    def traffic(self) -> Mapping[OpKind, Tally]:
        return dict(self._tally)

    # -- the way of every operation

    def _begin_gather(
        self,
        kind: OpKind,
        out: Sequence[Tensor],
        tensor: Tensor,
        *,
        after: Callable[[], None] = _nothing,
        facts: tuple[int, ...] = (),
    ) -> Flight:
        self._check_row(out, "out")
        self._keep(out[self.rank], tensor)
        sends = [None if r == self.rank else tensor for r in range(self.size)]
        recvs: list[Tensor | None] = [*out]
        recvs[self.rank] = None
        facts = (*facts, *(t.nbytes for t in out))
        return self._begin(kind, facts, sends, recvs, after=after)

    def _begin(
        self,
        kind: OpKind,
        facts: tuple[int, ...],
        sends: Sequence[Tensor | None],
        recvs: Sequence[Tensor | None],
        *,
        same: bool = True,
        after: Callable[[], None] = _nothing,
    ) -> Flight:
        if self._failure is not None:
            raise self._failure
        for tensor in (*sends, *recvs):
            if tensor is not None:
                self._check_tensor(tensor)
        exchange = self.make_exchange(kind, facts, sends, recvs, same=same)
        if self.size == 1:
            after()
            return Flight(self, None, _nothing)
        self._launch(exchange)
        return Flight(self, exchange, after)

    def make_exchange(
        self,
        kind: OpKind,
        facts: tuple[int, ...],
        sends: Sequence[Tensor | None],
        recvs: Sequence[Tensor | None],
        *,
        same: bool,
    ) -> Exchange:
        """Number, hash and count one operation."""
        exchange = Exchange(
            serial=self.operations.count,
            kind=kind,
            digest=self.operations.note(kind, *facts),
            sends=tuple(sends),
            recvs=tuple(recvs),
            same=same,
        )
        self._tally[kind] += _count(exchange)
        return exchange

    def complete(self, exchange: Exchange, timeout_s: float | None) -> None:
        """Wait for an exchange of this group."""
        if self._failure is not None:
            raise self._failure
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            self._complete(exchange, time.monotonic() + wait_s)
        except GroupError as error:
            raise self._fail(error) from None

    def _check_row(self, row: Sequence[Tensor], name: str) -> None:
        if len(row) != self.size:
            raise ValueError(f"{name} has {len(row)} tensors for {self.size} ranks")

    def _check_tensor(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise ValueError("a group moves contiguous tensors only")

    def _keep(self, out: Tensor, mine: Tensor) -> None:
        """What a rank sends to itself."""
        if out.nbytes != mine.nbytes:
            raise ValueError(f"out[{self.rank}] has {out.nbytes} bytes for {mine.nbytes}")
        if out.data_ptr() != mine.data_ptr():
            as_bytes(out).copy_(as_bytes(mine))

    # -- errors

    def _fail(self, error: GroupError) -> GroupError:
        self._failure = error
        return error

    def error(self, text: str, ranks: Sequence[int]) -> GroupError:
        """An error whose blame is on these ranks of the group."""
        return GroupError(text, ranks=tuple(self.members[rank] for rank in ranks))

    def _name(self, ranks: tuple[int, ...]) -> str:
        noun = "rank" if len(ranks) == 1 else "ranks"
        return f"{noun} {', '.join(str(self.members[rank]) for rank in ranks)} of {self.axis}"

    def _diverged(self, ranks: tuple[int, ...], serial: int) -> GroupError:
        verb = "does" if len(ranks) == 1 else "do"
        text = f"{self._name(ranks)} {verb} not do the operations of rank {self.members[0]}"
        return self.error(f"{text} (seen at operation {serial})", ranks)

    def late(self, exchange: Exchange, missing: tuple[int, ...], *, gone: bool) -> GroupError:
        """Why these ranks did not come: they diverged, if that is known; else gone, or late."""
        strays = self.strays(exchange.serial)
        if strays:
            return self._diverged(strays, exchange.serial)
        why = "gone" if gone else "late"
        verb = "is" if len(missing) == 1 else "are"
        what = f"{exchange.kind.name.lower()} (operation {exchange.serial})"
        return self.error(f"{self._name(missing)} {verb} {why}: {what}", missing)

    def strays(self, serial: int) -> tuple[int, ...]:
        """Ranks that are known to differ from rank 0 at this operation."""
        known = {r: self._digest_of(r, serial) for r in range(self.size)}
        return tuple(r for r, d in known.items() if None not in (d, known[0]) and d != known[0])

    def mismatch(self, source: int, serial: int) -> GroupError:
        """A message of `source` at its operation `serial` that is not what belongs here."""
        strays = self.strays(serial)
        if strays:
            return self._diverged(strays, serial)
        pair = tuple(sorted((self.rank, source)))
        text = f"{self._name(pair)} do not do the same operations (seen at operation {serial})"
        return self.error(text, pair)


def _count(exchange: Exchange) -> Tally:
    empty = exchange.kind is OpKind.BARRIER
    sent = [t.nbytes for t in exchange.sends if t is not None and (empty or t.nbytes)]
    received = [t.nbytes for t in exchange.recvs if t is not None and (empty or t.nbytes)]
    return Tally(
        calls=1,
        messages_sent=len(sent),
        bytes_sent=sum(sent),
        messages_received=len(received),
        bytes_received=sum(received),
    )


def _folded(rows: Sequence[Tensor], how: Reduce) -> Tensor:
    """Fold in rank order. Sums of half-width floats are rounded once, at the end."""
    if how is Reduce.MIN:
        low = rows[0]
        for row in rows[1:]:
            low = torch.minimum(low, row)
        return low
    wide = torch.float32 if rows[0].dtype in (torch.bfloat16, torch.float16) else rows[0].dtype
    total = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        total += row
    return total
