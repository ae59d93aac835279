"""How ranks come to life, the other ends of their wires played by the test."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch

from phloem.config import Config
from phloem.core.errors import ConfigError, EngineDead
from phloem.core.mesh import Mesh, ShardAxis
from phloem.core.refs import make_ref
from phloem.engine import ranks as ranks_module
from phloem.engine.rank_messages import (
    RankFailed,
    RankHello,
    RankPages,
    RankReady,
    RankStart,
    receive_start,
)
from phloem.engine.rank_seats import RankSeat, rank_seats, size_memory
from phloem.engine.ranks import Ranks
from phloem.kv.layout import PageLayout
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.pools import DevicePool
from phloem.worker import Wire, packed

OWNERS = ShardAxis(mesh=Mesh(cp=3), ranks_per_owner=1)
SPEC = KVSpec(
    kind=AttentionKind.GQA,
    dtype=KVDtype.FP32,
    num_layers=1,
    num_kv_heads=1,
    head_dim=4,
    page_size=2,
)


class Process:
    """Stands for a rank's process."""

    def __init__(self) -> None:
        self.pid = 1
        self.killed = False

    def wait(self, timeout_s: float | None = None) -> int:
        return -9

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> tuple[Ranks, dict[int, Wire]]:
    """Three ranks, and the wires of those that are not the leader."""
    theirs: dict[int, Wire] = {}

    def spawn(rank: int, _seat: RankSeat) -> Any:
        one, other = socket.socketpair()
        theirs[rank] = Wire(other)
        return ranks_module._Rank(Process(), Wire(one))  # type: ignore[arg-type]

    monkeypatch.setattr(ranks_module, "_spawn", spawn)
    return Ranks(OWNERS, 1), theirs


def test_the_rank_with_the_least_memory_decides(played: tuple[Ranks, dict[int, Wire]]) -> None:
    """For each component; then all are told, and the memory of all of them is there."""
    ranks, theirs = played
    theirs[1].send(packed(RankHello((30, 9))))
    theirs[2].send(packed(RankHello((40, 7))))
    assert ranks.start(Config(), (35, 8)) == (30, 7)
    place = ranks.place([PageLayout(SPEC, 30, 1)], (5,), max_running=3)
    for wire in theirs.values():
        assert receive_start(wire, RankStart).config == Config()
        assert receive_start(wire, RankPages) == RankPages((30,), (5,))
    assert len(place.pools[0]) == 3 * 30 * SPEC.page_bytes + SPEC.page_bytes
    place.peers.leave()
    ranks.kill()


def test_a_rank_that_ends_while_it_loads_is_named(played: tuple[Ranks, dict[int, Wire]]) -> None:
    ranks, theirs = played
    theirs[1].send(packed(RankHello((30,))))
    theirs[2].shut()
    with pytest.raises(EngineDead, match=r"^rank 2 failed while it was loading: .*SIGKILL$"):
        ranks.start(Config(), (35,))
    ranks.kill()
    assert all(rank.process.killed for rank in ranks._ranks.values())


def test_a_rank_says_itself_what_it_cannot_use(played: tuple[Ranks, dict[int, Wire]]) -> None:
    ranks, theirs = played
    theirs[1].send(packed(RankFailed("no such file", config=True)))
    with pytest.raises(ConfigError, match=r"^no such file$"):
        ranks.start(Config(), (35,))
    ranks.kill()


def test_ranks_that_loaded_other_things_are_refused(played: tuple[Ranks, dict[int, Wire]]) -> None:
    """Kernels that differ compute other bits."""

    class Own:
        kernels, weight_bytes = "native", 10

    ranks, theirs = played
    theirs[1].send(packed(RankReady("native", 10)))
    theirs[2].send(packed(RankReady("torch", 10)))
    with pytest.raises(ConfigError, match=r"rank 2 has loaded .*torch"):
        ranks.wait_ready(Own())  # type: ignore[arg-type]
    ranks.kill()


@pytest.mark.parametrize("placed", [False, True])
def test_ranks_that_are_killed_leave_no_descriptor_open(
    monkeypatch: pytest.MonkeyPatch, placed: bool
) -> None:
    """Whether rank 0 has taken its seat or not: a caller of `LLM` may try again and again."""
    ours: list[Wire] = []

    def spawn(_rank: int, _seat: RankSeat) -> Any:
        one, other = socket.socketpair()
        ours.append(Wire(other))
        return ranks_module._Rank(Process(), Wire(one))  # type: ignore[arg-type]

    monkeypatch.setattr(ranks_module, "_spawn", spawn)
    before = len(os.listdir("/proc/self/fd"))
    ranks = Ranks(OWNERS, 1)
    if placed:
        ranks.place([PageLayout(SPEC, 30, 1)], (5,), max_running=3)
    ranks.kill()
    del ranks  # what is mapped
    for wire in ours:
        wire.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_cannot_be_started_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 of 3: rank 1 is killed, and rank 0's seat is given back."""
    started: list[Process] = []

    def popen(*_args: Any, **_more: Any) -> Process:
        if started:
            raise OSError("no more processes")
        started.append(Process())
        return started[0]

    monkeypatch.setattr(ranks_module.subprocess, "Popen", popen)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no more processes"):
        Ranks(OWNERS, 1)
    assert started[0].killed
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_one_rank_writes_another_reads() -> None:
    """Through seats that have travelled as text: pages, sampled tokens, progress."""
    layout = PageLayout(SPEC, 4, 1)
    seats = rank_seats(ShardAxis(mesh=Mesh(cp=2), ranks_per_owner=1), 1)
    size_memory(seats[0], [layout], 3)
    places = [RankSeat.from_json(seat.to_json()).take() for seat in seats]
    pools = [
        DevicePool(layout, device=torch.device("cpu"), num_owners=2, memory=place.pools[0])
        for place in places
    ]
    page = bytes(range(SPEC.page_bytes % 256)) * (SPEC.page_bytes // (SPEC.page_bytes % 256))
    pools[0].write_page(4 + 2, page)
    assert pools[1].read(make_ref(1, 2)) == page
    places[1].peers.post(0, 0)
    places[0].peers.written(0, 0)
    for place in places:
        place.peers.leave()
