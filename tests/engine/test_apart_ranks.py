"""Ranks of one machine that share no memory, as those on GPUs: which way is taken, and on the CPU
the whole of it but for NCCL."""

from __future__ import annotations

import gc
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phloem.config import CacheOptions, Config, ModelOptions, ParallelOptions, SchedulerOptions
from phloem.core.errors import ConfigError, EngineDead, GroupError
from phloem.core.mesh import Mesh, ShardAxis
from phloem.engine import build, build_hosts, joined_ranks, rank_messages, startup_rows
from phloem.engine import ranks as ranks_module
from phloem.engine.apart import LOOPBACK, Rendezvous, place_apart
from phloem.engine.apart_ranks import ApartRanks
from phloem.engine.apart_seat import ApartSeat
from phloem.engine.build_pools import Pools, plan_pools
from phloem.engine.build_ranks import starting_ranks_apart
from phloem.engine.joined_ranks import JoinedRanks
from phloem.engine.loop_core import LoopCore
from phloem.engine.meeting import find_leader
from phloem.engine.rank_messages import FromRank, RankFailed, RankPages, RankStart
from phloem.engine.rank_process import RankProcess
from phloem.groups import TorchGroup
from phloem.worker import RankPlace, Wire, packed
from tests.contract.test_groups import in_threads
from tests.engine.test_meeting import AXIS, PATIENT_S, launch
from tests.engine.test_ranks import (
    GREEDY,
    PROMPTS,
    ask_until_loaded,
    expected,
    ids,
    model,
    open_llm,
    rank_pids,
)
from tests.fake_gpus import FREE_BYTES, FakeGpus

__all__ = ["expected", "model"]

CPU = torch.device("cpu")


class Reached(Exception):
    """What a test wanted to see has been called."""


def build_apart(config: Config, hooks: Any, eos_ids: tuple[int, ...]) -> LoopCore:
    """As `build.build_core` builds where each rank has a GPU."""
    return build.build_core_with(config, hooks, eos_ids, starting_ranks_apart)


def stores() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("phloem-ranks-")}


def on_gpus(model: Path, cp: int = 2) -> Config:
    return Config(
        model=ModelOptions(model=str(model), dtype="fp32", device="cuda", max_model_len=128),
        cache=CacheOptions(page_size=4),
        parallel=ParallelOptions(cp=cp),
        scheduler=SchedulerOptions(max_running=4, max_prefill_tokens=64),
    )


def test_ranks_apart_answer_as_one_rank_and_end_when_one_is_killed(
    model: Path, expected: list[tuple[int, ...]]
) -> None:
    """Processes of which none maps another one's pages, with a host tier. Red if anything is read
    in place, or if a process or the store outlives the engine."""
    before = stores()
    with open_llm(model, 2, builder=build_apart, host_memory="1MB") as llm:
        assert len(stores() - before) == 1
        assert ids(llm, PROMPTS) == expected
        again = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
        assert [one.token_ids for one in again] == expected
        assert all(one.cached.device > 0 for one in again)
        assert "pools not mapped" in dict(startup_rows(llm._core.facts))["remote KV"]
        ways = {way for entry in llm.stats().remote.steps_total for way in entry[:2]}
        assert ways <= {"gather_kv", "send_q"}
        assert ask_until_loaded(llm, expected)
        (rank,) = rank_pids(os.getpid())
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineDead, match="rank 1 failed: its process was killed by SIGKILL"):
            llm.generate(PROMPTS[0], GREEDY)
    assert not rank_pids(os.getpid())
    assert stores() == before


def test_a_rank_that_ends_before_it_has_met_the_others_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store is private to this user, and goes with the ranks."""

    class Ended:
        pid = 1

        def poll(self) -> int:
            return 3

        def wait(self, timeout_s: float | None = None) -> int:
            return 3

        def kill(self) -> None:
            """It is over."""

    def spawn(_rank: int, _seat: ApartSeat) -> Any:
        return ranks_module._Rank(Ended(), Wire(socket.socketpair()[0]))  # type: ignore[arg-type]

    gc.collect()
    before, descriptors = stores(), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(ranks_module, "_spawn", spawn)
    ranks = ApartRanks(AXIS, "cpu", 0.2)
    (folder,) = stores() - before
    assert (Path(tempfile.gettempdir()) / folder).stat().st_mode & 0o777 == 0o700
    told = r"^rank 1 has not come .*; rank 1 failed: its process ended with status 3$"
    with pytest.raises(EngineDead, match=told):
        ranks._take_place(4)
    ranks.kill()
    gc.collect()
    assert (stores(), len(os.listdir("/proc/self/fd"))) == (before, descriptors)


def test_a_seat_apart_travels_as_text() -> None:
    seat = ApartSeat(rank=1, axis=AXIS, folder="/somewhere", pages=7)
    assert ApartSeat.from_json(seat.to_json()) == seat
    assert seat.fds == (7,)
    assert not ApartSeat(rank=0, axis=AXIS, folder="/somewhere").fds


# -- which way is taken


@pytest.mark.parametrize(("cp", "wanted"), [(2, "apart"), (1, None)])
def test_ranks_on_gpus_are_started_apart(
    model: Path, monkeypatch: pytest.MonkeyPatch, cp: int, wanted: str | None
) -> None:
    """Red if they would be given memory to share, or if rank 0 does not take the first GPU."""
    seen: list[tuple[str, str]] = []

    def way(name: str) -> Any:
        @contextmanager
        def start(_config: Config, pools: Any) -> Iterator[None]:
            seen.append((name, pools.runs_on))
            raise Reached
            yield

        return start

    def load(_path: Path, options: Any, **_more: Any) -> None:
        seen.append(("alone", options.device))
        raise Reached

    FakeGpus(monkeypatch, 2)
    monkeypatch.setattr(build, "starting_ranks_apart", way("apart"))
    monkeypatch.setattr(build, "starting_ranks", way("mapped"))
    monkeypatch.setattr(build, "load_worker", load)
    with pytest.raises(Reached):
        build.build_core(on_gpus(model, cp), Hooks(), ())
    assert seen == [("alone", "cuda") if wanted is None else (wanted, "cuda:0")]


class Hooks:
    """Of a build that gets nowhere."""

    on_layer = on_load = wake = staticmethod(lambda *_: None)


def test_every_rank_of_a_machine_takes_a_gpu_and_its_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its number there; half of what that GPU has free, which nobody shares."""
    gpus = FakeGpus(monkeypatch, 3)
    config = on_gpus(model, cp=3)
    found = [plan_pools(config, model, "fp32", local_rank=rank) for rank in range(3)]
    assert [pools.runs_on for pools in found] == ["cuda:0", "cuda:1", "cuda:2"]
    assert gpus.asked == [torch.device("cuda", rank) for rank in range(3)]
    page_bytes = found[0].specs[0].page_bytes
    assert {pools.device for pools in found} == {(FREE_BYTES // 2 // page_bytes,)}
    options = build.worker_options(config, build.Hooks(), "fp32", found[2])
    assert options.device == "cuda:2"


@pytest.mark.parametrize(("count", "says"), [(1, "finds 1$"), (0, "none that it can use$")])
def test_fewer_gpus_than_ranks_is_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, count: int, says: str
) -> None:
    FakeGpus(monkeypatch, count)
    if not count:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"^--device cuda with 2 ranks .*{says}"):
        plan_pools(on_gpus(model), model, "fp32")
    if count:  # the other rank is on another machine
        plan_pools(on_gpus(model), model, "fp32", ranks_here=1)


def test_a_rank_takes_its_place_on_its_own_gpu(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 3 of four, number 1 of its machine."""
    FakeGpus(monkeypatch, 2)
    ours, theirs = map(Wire, socket.socketpair())
    ours.send(packed(RankStart(on_gpus(model, cp=4))))
    ours.send(packed(RankPages((7,), (0,))))
    taken: list[str] = []

    def take(_config: Config, pools: Pools) -> Any:
        taken.append(pools.runs_on)
        raise Reached("far enough")

    assert RankProcess(theirs, 3, take, local_rank=1, ranks_here=2).run() == 1
    assert taken == ["cuda:1"]
    theirs.close()
    messages = [message_of(body) for body in ours.frames()]
    assert messages[-1] == RankFailed("rank 3 failed: Reached: far enough", config=False)
    ours.close()


def message_of(body: bytes) -> FromRank:
    return rank_messages._FROM_RANK.decode(body)


class Group(TorchGroup):
    """What `TorchGroup.gloo` has made, and nothing behind it. `joined`: GPUs."""

    def __init__(self, name: str, rank: int, members: Any) -> None:
        self.name, self.rank, self.members, self.size = name, rank, members, len(members)
        self.joined: list[torch.device] = []
        self.given_up = self.closed = False

    def join_gpus(self, device: torch.device) -> None:
        self.joined.append(device)

    def give_up(self) -> None:
        self.given_up = True

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Groups in the order in which one rank has made them; all others are there."""
    groups: list[Group] = []

    def gloo(_store: Any, *, rank: int, axis: str, members: Any, **_how: Any) -> Group:
        groups.append(Group(axis, rank, members))
        return groups[-1]

    monkeypatch.setattr(TorchGroup, "gloo", gloo)
    return groups


def store_of(size: int) -> dist.HashStore:
    store = dist.HashStore()
    for rank in range(size):
        store.set(f"here/{rank}", "another machine")
    return store


def meet(device: str, axis: ShardAxis = AXIS) -> RankPlace:
    at = Rendezvous(
        rank=1, store=store_of(axis.mesh.world), address=LOOPBACK, timeout_s=5.0, device=device
    )
    return place_apart(at, axis, 4)


CASES = [
    ("cpu", Mesh(tp=2, cp=2), 2, []),
    ("cuda:1", Mesh(cp=2), 1, ["mesh"]),
    ("cuda:1", Mesh(tp=2), 2, ["tp"]),
    ("cuda:1", Mesh(tp=2, cp=2), 2, ["cp", "tp"]),
    ("cuda:1", Mesh(tp=2, cp=2), 1, ["mesh", "tp"]),  # latents, of which every rank owns pages
]


@pytest.mark.parametrize(("device", "mesh", "ranks_per_owner", "joined"), CASES, ids=str)
def test_groups_of_ranks_on_gpus_have_nccl(
    made: list[Group], device: str, mesh: Mesh, ranks_per_owner: int, joined: list[str]
) -> None:
    """Where pages, queries or sums travel; and who stops gives up waiting in all of them."""
    place = meet(device, ShardAxis(mesh=mesh, ranks_per_owner=ranks_per_owner))
    assert [group.name for group in made if group.joined] == joined
    assert {gpu for group in made for gpu in group.joined} == {torch.device(device)} - {CPU}
    assert place.pools is None
    place.give_up()
    assert all(group.given_up for group in made)


def test_gpus_that_do_not_connect_end_the_start(
    made: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leave no group: others would wait for this rank."""

    def refuse(self: Group, device: torch.device) -> None:
        raise GroupError(f"no way to {device}")

    monkeypatch.setattr(Group, "join_gpus", refuse)
    with pytest.raises(EngineDead, match=r"^no way to cuda:0$"):
        meet("cuda:0", ShardAxis(mesh=Mesh(tp=2, cp=2), ranks_per_owner=2))
    assert [group.closed for group in made] == [True, False]  # the last one closes itself


# -- ranks that somebody else has started, all on one machine


@pytest.mark.parametrize(("device", "wanted"), [("cuda", ("apart", "cuda:0")), ("cpu", "mapped")])
def test_ranks_that_torchrun_starts_on_gpus_are_apart(
    model: Path, monkeypatch: pytest.MonkeyPatch, device: str, wanted: Any
) -> None:
    seen: list[Any] = []

    def apart(_launch: Any, _timeout_s: float, _axis: Any, device: str) -> None:
        seen.append(("apart", device))
        raise Reached

    def mapped(*_: Any) -> None:
        seen.append("mapped")
        raise Reached

    monkeypatch.setattr(build_hosts, "JoinedRanks", apart)
    monkeypatch.setattr(build_hosts, "SeatedRanks", mapped)
    FakeGpus(monkeypatch, 2)
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": "1"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config = on_gpus(model)
    if device == "cpu":
        config = Config(
            model=ModelOptions(model=str(model)), cache=config.cache, parallel=config.parallel
        )
    with pytest.raises(Reached):
        build_hosts.build_core(config, Hooks(), ())
    assert seen == [wanted]


def test_ranks_of_one_machine_that_are_apart_meet_on_the_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They get no seat, and need no address of this machine that others could reach."""
    store = dist.HashStore()
    monkeypatch.setattr(joined_ranks, "open_store", lambda *_: store)
    one, other = (launch(rank, 2, 2) for rank in range(2))

    def play(rank: int) -> Any:
        if rank == 0:
            ranks = JoinedRanks(one, PATIENT_S, AXIS, "cpu")
            return ranks, ranks._take_place(4)
        met = find_leader(other, store, PATIENT_S)
        assert not met.seated
        at = Rendezvous(rank=1, store=met.store, address=LOOPBACK, timeout_s=PATIENT_S)
        return met, place_apart(at, AXIS, 4)

    (ranks, one_place), (met, other_place) = in_threads(2, play)  # type: ignore[misc]
    places = one_place, other_place
    in_threads(2, lambda rank: places[rank].group.barrier())
    ranks.kill()
    for place in places:
        place.leave()
    met.sock.close()
