"""Steps of a rank whose model, pages and messages are on a GPU of its own, which is not there.

What mixes devices is refused; values are nobody's, so what a step samples is invented.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phloem.core.mesh import Mesh, ShardAxis
from phloem.core.plan import PageTableUpdate, ReplicaPlan, RowResult
from phloem.core.refs import make_ref
from phloem.core.remote import IN_PLACE, Remote, RemoteWays
from phloem.groups.base import BaseGroup, Exchange
from phloem.kv.layout import PageLayout
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.models.safetensors_source import SafetensorsSource
from phloem.pools import DevicePool, HostArena
from phloem.transfer.copier import PartCopier, make_copier
from phloem.transfer.pool_bytes import PoolBytes
from phloem.worker import Hooks, InlineWorker, WorkerOptions, load_worker, measure, runner, sampler
from phloem.worker.peers import group_place
from tests.fake_gpus import FakeGpus
from tests.models.checkpoints import LATENT, make_checkpoint, make_latent, make_windowed
from tests.worker.rank_driver import RankDriver, striped
from tests.worker.test_sampler import VOCAB, candidate

PAGE, PAGES, MAX_RUNNING = 4, 40, 4
GPU = "cuda:1"


class Silent(BaseGroup):
    """A group of ranks that never say anything. `moved`: devices of what was to be moved, by kind
    of operation."""

    def __init__(self, rank: int = 1, size: int = 2) -> None:
        super().__init__(rank=rank, size=size, axis="cp", timeout_s=1.0)
        self.moved: dict[str, set[str]] = {}

    def _launch(self, exchange: Exchange) -> None:
        tensors = [t for t in (*exchange.sends, *exchange.recvs) if t is not None and t.nbytes]
        seen = self.moved.setdefault(exchange.kind.name, set())
        seen |= {str(tensor.device) for tensor in tensors}

    def _complete(self, exchange: Exchange, deadline_s: float) -> None:
        """What it receives is anything."""

    def _digest_of(self, rank: int, serial: int) -> int | None:
        return None

    def _keep(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        """By address, which these tensors do not have."""

    def close(self) -> None:
        """Nobody is told."""


def invented(logits: torch.Tensor, candidates: Any, _best: Any) -> list[RowResult]:
    assert str(logits.device) == GPU
    assert len(logits) == len(candidates)
    return [RowResult(row=c.plan.row, serial=c.plan.serial, token=7) for c in candidates]


def make_model(kind: str, folder: Path) -> dict[str, Any]:
    if kind in LATENT:
        make_latent(kind, folder)
    elif kind in ("gemma3", "mistral"):
        make_windowed(kind, folder, window=8)
        return {"window_pages": 20}
    else:
        make_checkpoint(kind, folder)
    return {}


def read_outside(gpus: FakeGpus, patch: pytest.MonkeyPatch) -> None:
    """Files have values."""
    real = SafetensorsSource._read

    def read(source: SafetensorsSource, name: str, part: Any) -> torch.Tensor:
        with gpus.outside():
            return real(source, name, part)

    patch.setattr(SafetensorsSource, "_read", read)


def options(kv_dtype: str, **more: Any) -> WorkerOptions:
    return WorkerOptions(
        dtype="fp32",
        kv_dtype=kv_dtype,
        device=GPU,
        page_size=PAGE,
        num_pages=PAGES,
        max_running=MAX_RUNNING,
        threads=1,
        inline=True,
        hooks=Hooks(nan_fill=True),
        **more,
    )


CELLS = [
    ("llama", 1, "gather_kv", "int8"),
    ("v3-yarn", 2, "send_q", "bf16"),
    ("mistral", 2, "send_q", "fp8"),
]
MORE = [
    ("llama", 1, "send_q", "fp32"),
    ("llama", 2, "send_q", "fp4"),
    ("gemma3", 1, "send_q", "fp32"),
    ("v3", 1, "gather_kv", "fp8"),
]


@pytest.mark.filterwarnings(
    "ignore:Accessing the data pointer"
)  # of weights, as a mark of identity
@pytest.mark.parametrize(
    ("kind", "tp", "way", "kv_dtype"),
    [*CELLS, *(pytest.param(*cell, marks=pytest.mark.long) for cell in MORE)],
    ids=str,
)
def test_what_a_step_computes_and_sends_stays_on_the_ranks_gpu(
    kind: str, tp: int, way: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, a prefix of others' pages, decodes, replicas, freed pages as NaN; sampled tokens are
    on the CPU. Red if one tensor of a step is made elsewhere."""
    more = make_model(kind, tmp_path)
    gpus = FakeGpus(monkeypatch, 2)
    monkeypatch.setattr(runner, "sample", invented)
    read_outside(gpus, monkeypatch)
    mesh = Mesh(tp=tp, cp=2)
    axis = ShardAxis(mesh=mesh, ranks_per_owner=1 if kind in LATENT else tp)
    world, parts, row = Silent(tp, mesh.world), Silent(1, 2), Silent(0, tp)  # first of row 1
    with gpus.mode():
        place = group_place(
            world,
            axis,
            MAX_RUNNING,
            parts=None if axis.size == mesh.world else parts,
            row=None if tp == 1 else row,
        )
        told: list[str] = []
        place = replace(place, give_up=partial(told.append, "give up"))
        loaded = load_worker(tmp_path, options(kv_dtype, **more), place=place)
        assert isinstance(loaded.worker, InlineWorker)
        assert {str(pool.buffer.data.device) for pool in loaded.pools} == {GPU}
        play(loaded.worker, axis, RemoteWays.all(Remote(way)), windows=len(loaded.specs) > 1)
        loaded.worker.stop()
        loaded.worker.close()
        assert told == ["give up"]
    assert world.moved.pop("ALL_GATHER") == {"cpu"}  # tokens
    travels = {"ALL_TO_ALL": {GPU}}
    all_own = axis.size == mesh.world
    assert [world.moved, parts.moved] == ([travels, {}] if all_own else [{}, travels])
    assert row.moved.get("ALL_REDUCE") == (None if tp == 1 else {GPU})


def play(worker: InlineWorker, axis: ShardAxis, ways: RemoteWays, *, windows: bool) -> None:
    """Two chunks; a chunk of the row and of another one that shares its pages; a token of both.
    Who computes the last page of a row samples it."""
    owner, one, two = striped(axis.size), list(range(2, 45)), list(range(2, 36))
    driver = RankDriver(worker, owner, size=axis.size, num_pages=PAGES, page_size=PAGE)
    driver.ways = (ways,)

    def admit(row: int, ids: list[int], **more: Any) -> None:
        driver.admit(row, ids, room=0, **more)
        if windows:
            refs = np.array([make_ref(owner(row, page), page) for page in range(12)])
            update = PageTableUpdate(row=row, first_page=0, refs=refs, component=1)
            driver._updates.append(update)

    admit(0, one)
    driver.step(driver.chunk(0, one, 0, 3))  # of which the other row computes all
    driver.step(driver.chunk(0, one, 3, 22))
    admit(1, two, shared_with=0, shared_pages=5)
    made, made_at = np.array([make_ref(0, 3)]), np.array([make_ref(1, 5)])
    rows = driver.chunk(0, one, 22, 42), driver.chunk(1, two, 20, 33)
    several = axis.size > 1
    driver.step(*rows, replicas=ReplicaPlan(made=made, made_at=made_at) if several else None)
    last = driver.step(driver.chunk(0, one, 42, 43), driver.chunk(1, two, 33, 34))
    ends = {row: owner(row, page) // axis.owners_per_row for row, page in ((0, 10), (1, 8))}
    ours = [row for row, index in ends.items() if index == axis.mesh.cp - 1]
    assert ours
    assert [row.row for row in last.rows] == ours


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("kind", ["llama", "gemma3", "v3-yarn"])
def test_one_rank_alone_stays_on_its_gpu(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which reads its pages where they lie."""
    more = make_model(kind, tmp_path)
    gpus = FakeGpus(monkeypatch, 1)
    monkeypatch.setattr(runner, "sample", invented)
    read_outside(gpus, monkeypatch)
    with gpus.mode():
        loaded = load_worker(tmp_path, options("fp32", **more))
        assert isinstance(loaded.worker, InlineWorker)
        axis = ShardAxis(mesh=Mesh(), ranks_per_owner=1)
        play(loaded.worker, axis, IN_PLACE, windows=len(loaded.specs) > 1)
        loaded.worker.close()


def test_what_is_asked_of_logits_is_done_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias, banned tokens and penalties, whose numbers come from the CPU."""
    row = candidate(
        1,
        prompt=(5, 6),
        output=(7, 7),
        stop_ids=(2,),
        logit_bias=((3, 1.5),),
        min_tokens=4,
        presence_penalty=0.5,
        repetition_penalty=1.2,
    )
    with FakeGpus(monkeypatch, 2).mode():
        sampler._adjust(torch.empty(VOCAB, device=GPU), row)


def test_pages_of_tiers_leave_a_gpu_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bytes of the CPU, also where a rank of a row holds only its heads of them. Red if what
    picks them is elsewhere than they are."""
    spec = KVSpec(
        kind=AttentionKind.GQA,
        dtype=KVDtype.BF16,
        num_layers=3,
        num_kv_heads=2,
        head_dim=8,
        page_size=PAGE,
    )
    with FakeGpus(monkeypatch, 2).mode():
        pool = DevicePool(PageLayout(spec, 5, 2), device=torch.device(GPU))
        pages = PoolBytes(pool)
        slots = np.array([3, 0])
        taken = pages.taken(slots)
        assert (str(taken.device), taken.dtype) == (GPU, torch.uint8)
        room = pages.room(2, 3)
        assert tuple(taken.shape) == room.shape
        assert room.nbytes == 2 * spec.page_bytes
        pages.write(slots, 1, pages.room(2, 2))
        part = pool.layout.of_one_rank(ShardAxis(mesh=Mesh(tp=2), ranks_per_owner=2))
        arena = HostArena(PageLayout(spec, 3, 2))
        copier = make_copier(DevicePool(part, device=torch.device(GPU)), arena)
        assert isinstance(copier, PartCopier)  # a page of the arena is more than what is there
        copier.to_device(slots, np.array([1, 2]), 0, 3)
        arena.close()


def test_the_link_is_measured_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not between CPUs, over another link; and the clock is read when the GPU has nothing left."""
    gpus, group, waited = FakeGpus(monkeypatch, 2), Silent(), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))
    with gpus.mode():
        measure._exchange(group, 64, torch.device(GPU))
        measure._copy_rate(torch.empty(8, device=GPU), torch.empty(8, device=GPU))
    assert group.moved["ALL_TO_ALL"] == {GPU}
    assert waited == [GPU] * (2 + 2 * measure.READ_TURNS)
