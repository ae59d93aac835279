"""A group over torch.distributed: gloo for tensors on a CPU, NCCL for those on a GPU.

Point-to-point messages only, so that sizes may differ. With gloo every message is tagged with the
number and kind of its operation; NCCL has no tags (see `groups.nccl`), and a rank that diverges
there shows at `verify`, which is on the CPU, or at the deadline. When something goes wrong, ranks
leave their latest digests in the store, where the others look before they say who is to blame.

Ranks with a GPU each have both: `join_gpus`. What an operation moves lies on the GPU of every rank
or on none.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from phloem.core.errors import GroupError
from phloem.core.group import OpKind
from phloem.groups.base import DEFAULT_TIMEOUT_S, BaseGroup, Exchange, as_bytes
from phloem.groups.nccl import GivenUp, Nccl, NcclWork

__all__ = ["TorchGroup"]

_REMEMBERED = 64

_Works: TypeAlias = list[tuple[int, dist.Work | NcclWork]]  # and the rank that is missed


class TorchGroup(BaseGroup):
    """One rank's end over a process group, which it takes over, and a store of all its ranks."""

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        store: Store,
        *,
        axis: str = "cp",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        members: Sequence[int] = (),
    ) -> None:
        """`store`: of this group alone. `members`: as of `BaseGroup`."""
        super().__init__(
            rank=process_group.rank(),
            size=process_group.size(),
            axis=axis,
            timeout_s=timeout_s,
            members=members,
        )
        self._group: dist.ProcessGroup | None = process_group
        self._store = PrefixStore(f"phloem-{axis}", store)
        self._begun: dict[int, int] = {}
        self._works: dict[int, _Works] = {}
        self._gpus: Nccl | None = None

    @classmethod
    def gloo(
        cls,
        store: Store,
        *,
        rank: int,
        size: int,
        axis: str = "cp",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        members: Sequence[int] = (),
        meet_s: float | None = None,
        address: str | None = None,
    ) -> TorchGroup:
        """Meet the other ranks at the store, which is of this group alone. Blocks until all have
        come, for `meet_s` at most (None: `timeout_s`).

        `members`: as of `BaseGroup`. `address`: of this machine, at which the others reach it;
        None: what its name resolves to.
        """
        named = PrefixStore(f"phloem-gloo-{axis}", store)
        kind: Any = ProcessGroupGloo  # whose stubs know less than it does
        try:
            if address is None:
                device = ProcessGroupGloo.create_default_device()
            else:
                device = ProcessGroupGloo.create_device(hostname=address)
            options = kind._Options()  # noqa: SLF001 - there is no other name for it
            options._timeout = datetime.timedelta(seconds=meet_s or timeout_s)  # noqa: SLF001
            options._devices = [device]  # noqa: SLF001
            # Not a ProcessGroup by name, but by all that is called here.
            gloo = cast(dist.ProcessGroup, kind(named, rank, size, options))
        except RuntimeError as error:  # also dist.DistError: somebody did not come
            raise GroupError(f"the ranks of {axis} did not meet: {_line(error)}") from error
        return cls(gloo, store, axis=axis, timeout_s=timeout_s, members=members)

    def join_gpus(self, device: torch.device) -> None:
        """From now on tensors on this rank's GPU `device` may be moved. All ranks call it; blocks
        until they have. Raises GroupError, and leaves the group, if their GPUs do not connect."""
        store = PrefixStore("nccl", self._store)
        try:
            self._gpus = Nccl.meet(
                store, rank=self.rank, size=self.size, device=device, timeout_s=self.timeout_s
            )
        except GroupError:
            self.close()
            raise

    def give_up(self) -> None:
        """Wait for no message between GPUs any more: nothing else ends a wait for a rank that has
        gone. From any thread; the group is of no use after it."""
        gpus = self._gpus
        if gpus is not None:
            gpus.give_up()

    def _launch(self, exchange: Exchange) -> None:
        self._begun[exchange.serial] = exchange.digest
        self._begun.pop(exchange.serial - _REMEMBERED, None)
        tensors = [t for t in (*exchange.sends, *exchange.recvs) if t is not None and t.nbytes]
        if any(t.is_cuda for t in tensors):
            self._works[exchange.serial] = self._launch_batch(exchange)
        else:
            self._works[exchange.serial] = self._launch_tagged(exchange)

    def _launch_tagged(self, exchange: Exchange) -> _Works:
        tag = (exchange.serial * len(OpKind) + exchange.kind) & 0x3FFFFFFF
        carries_nothing = exchange.kind is OpKind.BARRIER
        works: _Works = []
        group = self._open()
        for peer in range(self.size):
            # Both ends know the size, so a message of no bytes need not be sent; a barrier's is
            # the message.
            for tensor, move in (
                (exchange.recvs[peer], group.recv),
                (exchange.sends[peer], group.send),
            ):
                if tensor is None or not (tensor.nbytes or carries_nothing):
                    continue
                payload = torch.zeros(1, dtype=torch.uint8) if carries_nothing else tensor
                try:
                    works.append((peer, move([as_bytes(payload)], peer, tag)))
                except RuntimeError as error:
                    raise self._blame(exchange, peer, error) from error
        return works

    def _launch_batch(self, exchange: Exchange) -> _Works:
        self._open()
        if self._gpus is None:
            raise ValueError(f"the ranks of {self.axis} have not joined their GPUs")
        rows = (
            [None if t is None or not t.nbytes else as_bytes(t) for t in row]
            for row in (exchange.sends, exchange.recvs)
        )
        try:
            return [(self.rank, self._gpus.begin(*rows))]
        except RuntimeError as error:
            raise self._blame(exchange, self.rank, error) from error

    def _complete(self, exchange: Exchange, deadline_s: float) -> None:
        for peer, work in self._works.pop(exchange.serial):
            left_s = max(1e-3, deadline_s - time.monotonic())  # 0 would mean: for ever
            try:
                work.wait(datetime.timedelta(seconds=left_s))
            except GivenUp:
                raise self.error("this rank waits for no other one any more", ()) from None
            except RuntimeError as error:
                raise self._blame(exchange, peer, error) from error

    def _blame(self, exchange: Exchange, peer: int, error: RuntimeError) -> GroupError:
        """Leave word, see what the others have left, and say who it was."""
        with contextlib.suppress(RuntimeError):  # the store is gone when its rank is
            for serial, digest in self._begun.items():
                self._store.set(f"{self.rank}/{serial}", str(digest))
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        missing = (peer,) if peer != self.rank else self._others
        return self.late(exchange, missing, gone=not late)

    def _digest_of(self, rank: int, serial: int) -> int | None:
        if rank == self.rank:
            return self._begun.get(serial)
        key = f"{rank}/{serial}"
        try:
            self._store.wait([key], datetime.timedelta(seconds=min(1.0, self.timeout_s)))
            return int(self._store.get(key))
        except RuntimeError:
            return None

    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise GroupError("this group is closed", ranks=(self.rank,))
        return self._group

    def close(self) -> None:
        # Connections close with the last reference, and that is how peers learn of it.
        self._works.clear()
        gpus, self._gpus = self._gpus, None
        if gpus is not None:
            gpus.abort()
        if self._group is not None:
            self._group.shutdown()
            self._group = None


def _line(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0]
