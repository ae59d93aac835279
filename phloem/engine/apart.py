"""How ranks that share no memory form their groups, over the store at which they have met.

    here/R       rank R has come, and on which machine it is: who has not is named before anybody
                 waits for it in a library
    mesh         all ranks: sampled tokens; pages and queries too, where every rank owns pages
    part-P       those that hold part P of the heads of pages: pages and queries
    row-I        those that compute the same tokens: sums; through shared memory where all of them
                 are on one machine, and not on GPUs

What a group leaves in the store, it leaves under a name of its own. Where ranks have GPUs, these
are connected in all groups that move what is on them.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from phloem.config.launch import Launch
from phloem.core.errors import EngineDead, GroupError
from phloem.core.mesh import ShardAxis
from phloem.engine.row_seats import machine_name, named, row_seat
from phloem.groups import ShmGroup, TorchGroup
from phloem.worker import RankPlace
from phloem.worker.peers import PATIENCE_S, group_place

__all__ = ["LOOPBACK", "Rendezvous", "place_apart"]

LOOPBACK = "127.0.0.1"  # the address of ranks that are all on one machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where rank `rank` forms its groups. `store`: of this start alone. `address`: as of
    `TorchGroup.gloo`. `timeout_s`: so long all of them may take together. `machine`: as of
    `row_seats.machine_name`. `device`: of this rank's pages, as PyTorch calls it."""

    rank: int
    store: Store
    address: str | None
    timeout_s: float
    machine: str = field(default_factory=machine_name)
    device: str = "cpu"

    @classmethod
    def of_launch(
        cls, launch: Launch, store: Store, address: str, *, timeout_s: float, device: str
    ) -> Rendezvous:
        """Of a process that somebody else has started; it has met the others at `address`."""
        return cls(
            rank=launch.rank,
            store=store,
            address=LOOPBACK if launch.on_one_machine else address,
            timeout_s=timeout_s,
            device=device,
        )

    @property
    def gpu(self) -> torch.device | None:
        """This rank's; None if it runs on the CPU."""
        device = torch.device(self.device)
        return device if device.type == "cuda" else None


def place_apart(at: Rendezvous, axis: ShardAxis, max_running: int) -> RankPlace:
    """This rank's place among those of `axis.mesh`; every one of them calls it, and none returns
    before all have. Raises EngineDead if they do not."""
    deadline_s = time.monotonic() + at.timeout_s
    mesh, rank = axis.mesh, at.rank
    machines = _wait_for_all(at, mesh.world, deadline_s)
    made: list[TorchGroup | ShmGroup] = []
    parts = row = None
    # In the same order everywhere: who waits in one group must be awaited in no other one.
    try:
        own_gpu = at.gpu if axis.size == mesh.world else None  # else only tokens travel in it
        world = _group(at, "mesh", "mesh", range(mesh.world), deadline_s, own_gpu)
        made.append(world)
        if 1 < axis.size < mesh.world:
            name = f"part-{axis.part_of(rank)}"
            parts = _group(at, name, "cp", axis.peers_of(rank), deadline_s, at.gpu)
            made.append(parts)
        if mesh.tp > 1:
            row = _row(at, axis, machines, deadline_s)
            made.append(row)
    except GroupError as error:
        for group in made:
            group.close()
        raise EngineDead(str(error)) from None
    place = group_place(world, axis, max_running, parts=parts, row=row)
    return replace(place, give_up=partial(_give_up, made))


def _give_up(groups: Sequence[TorchGroup | ShmGroup]) -> None:
    """A rank that ends wakes who waits for it, but where its GPU should have."""
    for group in groups:
        if isinstance(group, TorchGroup):
            group.give_up()


def _row(
    at: Rendezvous, axis: ShardAxis, machines: Sequence[str], deadline_s: float
) -> TorchGroup | ShmGroup:
    ranks = axis.mesh.row_of(at.rank)
    name = f"row-{axis.mesh.cp_index(at.rank)}"
    here = {machines[rank] for rank in ranks}
    if len(here) > 1 or "" in here or at.gpu is not None:
        return _group(at, name, "tp", ranks, deadline_s, at.gpu)
    store = PrefixStore(name, at.store)
    seat = row_seat(store, ranks, at.rank, timeout_s=PATIENCE_S, deadline_s=deadline_s)
    return ShmGroup(seat)


def _group(
    at: Rendezvous,
    name: str,
    kind: str,
    ranks: Sequence[int],
    deadline_s: float,
    gpu: torch.device | None,
) -> TorchGroup:
    """`kind`: what errors call it. `gpu`: the group moves what is there."""
    group = TorchGroup.gloo(
        PrefixStore(name, at.store),
        rank=ranks.index(at.rank),
        size=len(ranks),
        axis=kind,
        timeout_s=PATIENCE_S,
        members=ranks,
        meet_s=_left_s(deadline_s),
        address=at.address,
    )
    if gpu is not None:
        group.join_gpus(gpu)
    return group


def _wait_for_all(at: Rendezvous, size: int, deadline_s: float) -> list[str]:
    """The machine of each rank."""
    keys = [f"here/{rank}" for rank in range(size)]
    try:
        at.store.set(keys[at.rank], at.machine)
        for key in keys:
            with contextlib.suppress(RuntimeError):  # it is late; or the store is gone: see below
                at.store.wait([key], datetime.timedelta(seconds=_left_s(deadline_s)))
        missing = [rank for rank, key in enumerate(keys) if not at.store.check([key])]
        if not missing:
            return [at.store.get(key).decode() for key in keys]
    except RuntimeError as error:
        raise EngineDead(f"the store of the ranks is gone: {_line(error)}") from None
    raise EngineDead(
        f"{named(missing)} not come to form groups for {at.timeout_s:g} s, though the leader had "
        "taken all in; what is written there says why"
    )


def _left_s(deadline_s: float) -> float:
    return max(1e-3, deadline_s - time.monotonic())  # 0 would mean: for ever


def _line(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0]
