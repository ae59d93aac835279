"""Which library moves which tensor, and in what order: both played, on GPUs that are not there."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phloem.core.errors import GroupError
from phloem.core.group import OpKind, Reduce
from phloem.groups import TorchGroup
from phloem.groups.base import BaseGroup
from phloem.groups.nccl import Nccl
from tests.fake_gpus import FakeGpus

GPU = torch.device("cuda:1")
RANK, SIZE = 1, 3
TIMEOUT_S = 0.05


class Work:
    """Of one library. Over from the start, unless `open`."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open, self.looked = is_open, threading.Event()

    def is_completed(self) -> bool:
        self.looked.set()
        return not self.is_open

    def wait(self, timeout: datetime.timedelta) -> None:
        assert not self.is_open


class Library:
    """A process group that writes down what it is asked for: (what, peer, bytes, device, tag)."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.is_open = False
        self.works: list[Work] = []

    def rank(self) -> int:
        return RANK

    def size(self) -> int:
        return SIZE

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        return self._note("send", tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        return self._note("recv", tensors, peer, tag)

    def _note(self, what: str, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        (tensor,) = tensors
        assert tensor.dtype is torch.uint8
        self.asked.append((what, peer, tensor.nbytes, tensor.device.type, tag))
        return self._work()

    def _work(self) -> Work:
        self.works.append(Work(is_open=self.is_open))
        return self.works[-1]

    def _start_coalescing(self, device: torch.device) -> None:
        self.asked.append(("begin", device))

    def _end_coalescing(self, device: torch.device) -> Work:
        self.asked.append(("end", device))
        return self._work()

    def shutdown(self) -> None:
        self.asked.append(("shutdown",))

    def abort(self) -> None:
        self.asked.append(("abort",))


class Played:
    """One rank's group over two libraries."""

    def __init__(self, patch: pytest.MonkeyPatch, gpus: FakeGpus) -> None:
        self.gloo, self.nccl, self.gpus = Library(), Library(), gpus
        self.met: list[dict[str, Any]] = []
        library: Any = self.gloo
        self.group = TorchGroup(library, dist.HashStore(), timeout_s=TIMEOUT_S)
        # What stays on a rank is copied by address, and these tensors have none.
        patch.setattr(BaseGroup, "_keep", lambda *_: None)

        def meet(store: Any, **how: Any) -> Nccl:
            self.met.append(how)
            library: Any = self.nccl
            return Nccl(library, library, how["device"])

        patch.setattr(Nccl, "meet", meet)

    def exchange(self, counts: list[int], device: torch.device | str) -> Any:
        """All of them to and from each other rank, `counts[r]` numbers to and from rank r."""
        parts = [torch.empty(count, dtype=torch.float32, device=device) for count in counts]
        out = [torch.empty_like(part) for part in parts]
        return self.group.begin_all_to_all(out, parts)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    gpus = FakeGpus(monkeypatch, 2)
    with gpus.mode():
        yield Played(monkeypatch, gpus)


def test_what_is_on_a_gpu_goes_over_nccl_and_all_else_over_gloo(played: Played) -> None:
    """One batch for each operation, in the order in which they begin; messages without bytes are
    not sent. Red if NCCL gets a tensor of the CPU, or gloo one of the GPU."""
    played.group.join_gpus(GPU)
    assert played.met == [{"rank": RANK, "size": SIZE, "device": GPU, "timeout_s": TIMEOUT_S}]
    flights = [
        played.exchange([5, 0, 0], GPU),
        played.exchange([2, 2, 2], "cpu"),
        played.exchange([1, 9, 3], GPU),
    ]
    for flight in reversed(flights):
        flight.finish()
    begin, end = ("begin", GPU), ("end", GPU)
    first = [("send", 0, 20, "cuda", 0), ("recv", 0, 20, "cuda", 0)]
    third = [
        (what, to, size, "cuda", 0) for to, size in ((0, 4), (2, 12)) for what in ("send", "recv")
    ]
    assert played.nccl.asked == [begin, *first, end, begin, *third, end]
    tag = 1 * len(OpKind) + OpKind.ALL_TO_ALL
    assert sorted(played.gloo.asked) == sorted(
        (what, to, 8, "cpu", tag) for to in (0, 2) for what in ("send", "recv")
    )
    assert set(played.gpus.current) == {GPU}


def test_nothing_is_begun_where_nothing_has_bytes(played: Played) -> None:
    """NCCL has no empty batch."""
    played.group.join_gpus(GPU)
    played.exchange([0, 7, 0], GPU).finish()
    assert played.nccl.asked == played.gloo.asked == []


def test_barriers_and_what_is_compared_stay_on_the_cpu(played: Played) -> None:
    played.group.join_gpus(GPU)
    played.group.barrier()
    played.group.all_reduce(torch.zeros(3), Reduce.MIN)
    assert {entry[3] for entry in played.gloo.asked} == {"cpu"}
    assert not played.nccl.asked


def test_sums_on_gpus_are_gathered_and_folded_like_all_others(played: Played) -> None:
    """In rank order, so that every rank has the same bits: NCCL would fold in its own order."""
    played.group.join_gpus(GPU)
    played.group.all_reduce(torch.zeros(3, device=GPU), Reduce.SUM)
    assert [entry[0] for entry in played.nccl.asked] == ["begin", *["send", "recv"] * 2, "end"]
    assert played.group.traffic()[OpKind.ALL_REDUCE].bytes_sent == 2 * 12


def test_a_rank_that_has_not_joined_its_gpu_is_refused(played: Played) -> None:
    with pytest.raises(ValueError, match="ranks of cp have not joined their GPUs"):
        played.exchange([1, 1, 1], GPU)


def test_a_batch_that_does_not_end_is_late_at_the_deadline(played: Played) -> None:
    """Nobody waits on the GPU alone, where there is no deadline."""
    played.group.join_gpus(GPU)
    played.nccl.is_open = True
    flight = played.exchange([1, 0, 1], GPU)
    with pytest.raises(GroupError, match=r"ranks 0, 2 of cp are late: all_to_all") as caught:
        flight.finish()
    assert caught.value.ranks == (0, 2)


def test_who_gives_up_waits_no_more(played: Played) -> None:
    """Another thread says so: a rank that is gone ends no batch."""
    played.group.join_gpus(GPU)
    played.nccl.is_open = True
    flight = played.exchange([1, 0, 1], GPU)

    def give_up() -> None:
        assert played.nccl.works[-1].looked.wait(30)
        played.group.give_up()

    thread = threading.Thread(target=give_up)
    thread.start()
    with pytest.raises(GroupError, match="waits for no other one any more"):
        flight.finish(60.0)
    thread.join()


def test_who_leaves_ends_what_runs_on_its_gpu(played: Played) -> None:
    """Once; then nothing is begun there any more."""
    played.group.join_gpus(GPU)
    played.group.close()
    played.group.close()
    assert played.nccl.asked == [("abort",)]
    assert played.gloo.asked == [("shutdown",)]
    with pytest.raises(GroupError, match="closed"):
        played.exchange([1, 1, 1], GPU)


def test_who_cannot_connect_its_gpu_leaves(played: Played, monkeypatch) -> None:
    """Others are told at once, and not at a deadline."""

    def refuse(*_: Any, **_how: Any) -> Nccl:
        raise GroupError("no way")

    monkeypatch.setattr(Nccl, "meet", refuse)
    with pytest.raises(GroupError, match="no way"):
        played.group.join_gpus(GPU)
    assert played.gloo.asked == [("shutdown",)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("driver", [False, True])
def test_where_there_is_no_gpu_nccl_is_refused(driver: bool, monkeypatch) -> None:
    """Whether PyTorch was built with NCCL or not, and whether it or NCCL finds none."""
    if driver:
        monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    with pytest.raises(GroupError, match="NCCL"):
        Nccl.meet(dist.HashStore(), rank=0, size=2, device=GPU, timeout_s=1.0)


def test_gpus_that_are_never_connected_are_an_error_in_time(monkeypatch) -> None:
    """The library would wait for a rank that has gone, without a deadline. And what it says comes
    through."""
    never = threading.Event()
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(Nccl, "_connected", lambda *_: never.wait(60))
    how: dict[str, Any] = {"rank": 1, "size": 3, "device": GPU, "timeout_s": 0.05}
    with pytest.raises(GroupError, match=r"^cuda:1 of rank 1 .* other 2 ranks for 0.05 s"):
        Nccl.meet(dist.HashStore(), **how)
    never.set()

    def fail(*_: Any) -> Nccl:
        raise ValueError("no such device\nand places in the library")

    monkeypatch.setattr(Nccl, "_connected", fail)
    told = r"^NCCL does not connect cuda:1 of rank 1: no such device$"
    with pytest.raises(GroupError, match=told):
        Nccl.meet(dist.HashStore(), **(how | {"timeout_s": 60.0}))


class Answered(Library):
    """An all_reduce that has the sum of `ranks` ranks."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def allreduce(self, tensors: list[torch.Tensor], _options: Any) -> Work:
        tensors[0].fill_(self.ranks)
        return Work()


def test_ranks_shake_hands_before_some_of_them_exchange() -> None:
    """A communicator is made by all of its ranks at once. Red if a wrong sum passes."""
    cpu = torch.device("cpu")
    for ranks in (SIZE, SIZE - 1):
        library: Any = Answered(ranks)
        nccl = Nccl(library, library, cpu)
        if ranks == SIZE:
            nccl.shake_hands(1.0)
            continue
        with pytest.raises(RuntimeError, match="2 of 3 ranks have answered"):
            nccl.shake_hands(1.0)
