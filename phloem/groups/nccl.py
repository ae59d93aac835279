"""Messages between GPUs, over NCCL.

NCCL has no tags: what one rank sends another arrives in the order in which it was sent. So the
messages of one operation are one batch, operations are begun in the same order on all ranks, and
each rank begins them on one thread, as the contract of every group says. A message without bytes is
neither sent nor awaited: both ends know the size. Then the n-th batch of two ranks that has
messages between them is the same operation on both, whatever else is in flight.

A batch waits on the GPU for what its rank's current stream was given before it, such as the kernel
that writes what is sent. Who waits for a batch does so on the host, to a deadline, and lets the
current stream wait as well.

None of this has run on hardware yet.
"""

from __future__ import annotations

import datetime
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from phloem.core.errors import GroupError

__all__ = ["GivenUp", "Nccl", "NcclWork"]

# From one look at a batch to the next: short beside a layer, and the core is free meanwhile.
_LOOK_S = 20e-6
# The library itself ends the process after so many times our deadline, which comes first.
_LAST_RESORT = 2.0
_OVER = datetime.timedelta(seconds=1)  # of a batch that is over: nothing is waited for


class GivenUp(Exception):
    """This rank waits for nobody any more."""


class NcclWork:
    """A batch that has been begun."""

    def __init__(self, work: dist.Work, given_up: threading.Event) -> None:
        self._work, self._given_up = work, given_up

    def wait(self, timeout: datetime.timedelta) -> None:
        """Return when its messages have come and gone on the GPU; what the current stream is given
        from now on comes after them. Raises RuntimeError at the timeout, or if NCCL has failed;
        GivenUp once this rank has given up."""
        deadline_s = time.monotonic() + timeout.total_seconds()
        while not self._work.is_completed():
            if self._given_up.is_set():
                raise GivenUp
            if time.monotonic() >= deadline_s:
                raise RuntimeError("timed out")
            time.sleep(_LOOK_S)
        self._work.wait(_OVER)


class Nccl:
    """One rank's end. `group`: a process group that has NCCL for `device`, which no other rank of
    it has; taken over, as `backend` is, which is the NCCL in it."""

    def __init__(self, group: dist.ProcessGroup, backend: Any, device: torch.device) -> None:
        self._group, self._backend, self.device = group, backend, device
        self._given_up = threading.Event()

    @classmethod
    def meet(
        cls, store: Store, *, rank: int, size: int, device: torch.device, timeout_s: float
    ) -> Nccl:
        """Connect the GPUs of all ranks, each of which calls it. Raises GroupError if they are not
        connected within `timeout_s`: the library itself would wait for ever."""
        if not dist.is_nccl_available():
            raise GroupError("this build of PyTorch has no NCCL, over which ranks on GPUs exchange")
        outcomes: queue.SimpleQueue[Nccl | Exception] = queue.SimpleQueue()

        def connect() -> None:
            try:
                outcomes.put(cls._connected(store, rank, size, device, timeout_s))
            except Exception as error:  # the thread's entry point: raised by who waits for it
                outcomes.put(error)

        # Where it hangs it is left behind.
        threading.Thread(target=connect, name="phloem-nccl", daemon=True).start()
        try:
            outcome = outcomes.get(timeout=timeout_s)
        except queue.Empty:
            raise GroupError(
                f"{device} of rank {rank} has not been connected with the GPUs of the other "
                f"{size - 1} ranks for {timeout_s:g} s; their output may say why"
            ) from None
        if isinstance(outcome, Exception):
            why = (str(outcome).strip() or type(outcome).__name__).splitlines()[0]
            raise GroupError(f"NCCL does not connect {device} of rank {rank}: {why}") from outcome
        return outcome

    @classmethod
    def _connected(
        cls, store: Store, rank: int, size: int, device: torch.device, timeout_s: float
    ) -> Nccl:
        # A name that only builds with NCCL have.
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=_LAST_RESORT * timeout_s)  # noqa: SLF001
        with torch.cuda.device(device):
            backend = ProcessGroupNCCL(store, rank, size, options)
            group = dist.ProcessGroup(store, rank, size)
            group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)  # noqa: SLF001
            made = cls(group, backend, device)
            made.shake_hands(timeout_s)
        return made

    def shake_hands(self, timeout_s: float) -> None:
        """Something that all ranks do: only then may some of them exchange what others do not.

        Raises RuntimeError if NCCL brings something else than was sent.
        """
        ones = torch.ones(1, dtype=torch.int64, device=self.device)
        work = NcclWork(self._group.allreduce([ones], dist.AllreduceOptions()), self._given_up)
        work.wait(datetime.timedelta(seconds=timeout_s))
        if int(ones) != self._group.size():
            raise RuntimeError(f"{int(ones)} of {self._group.size()} ranks have answered")

    def begin(self, sends: Sequence[Tensor | None], recvs: Sequence[Tensor | None]) -> NcclWork:
        """One batch: `sends[r]` to rank r, `recvs[r]` from it, bytes on `device`; at least one.

        The tensors must live until it is over. Raises RuntimeError if NCCL refuses it.
        """
        with torch.cuda.device(self.device):
            self._group._start_coalescing(self.device)  # noqa: SLF001 - as batch_isend_irecv does
            for peer, (sent, received) in enumerate(zip(sends, recvs, strict=True)):
                if sent is not None:
                    self._group.send([sent], peer, 0)
                if received is not None:
                    self._group.recv([received], peer, 0)
            work = self._group._end_coalescing(self.device)  # noqa: SLF001
        return NcclWork(work, self._given_up)

    def give_up(self) -> None:
        """Whoever waits for a batch, or will, raises GivenUp. From any thread."""
        self._given_up.set()

    def abort(self) -> None:
        """End what runs on the GPU, whose other ends may be gone, and leave. Once."""
        self.give_up()
        self._backend.abort()
