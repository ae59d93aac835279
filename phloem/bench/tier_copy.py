"""Copies between device and host against a plain memcpy, and loads under a running step.

The copies are the transfer engine's own: submitted, carried out on its thread, polled. A load is
measured as a step sees it, layer after layer. The memcpy moves the same bytes in one call.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from phloem.bench.paired import Quad, quad, ratio_result, result
from phloem.core.clock import MonotonicClock
from phloem.core.plan import PageTableUpdate, RowInit, RowPlan, StepPlan
from phloem.core.request import SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.core.transfer import Transfer, TransferKind
from phloem.engine.models import resolve_model
from phloem.kv.layout import PageLayout
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.pools import DevicePool, HostArena
from phloem.transfer import TransferEngine, TransferHooks, memory_of
from phloem.worker import InlineWorker, LoadedWorker, WorkerOptions, load_worker

__all__ = ["measure_copies", "measure_overlap"]

PATIENCE_S = 60.0
NUM_PAGES = 256  # 4,096 tokens
POOL_PAGES = 2 * NUM_PAGES
# SmolLM2-135M in bf16.
SPEC = KVSpec(
    kind=AttentionKind.GQA,
    dtype=KVDtype.BF16,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    page_size=16,
)
OVERLAP_PAGES, OVERLAP_TOKENS = 16, 64


def measure_copies(rounds: int) -> list[dict[str, Any]]:
    """`host_copy_over_memcpy`: the slower direction's speed, as a part of memcpy's; in quads."""
    layout = PageLayout(SPEC, POOL_PAGES, 3)
    pool, arena = DevicePool(layout, device=torch.device("cpu")), HostArena(layout)
    pool.buffer.data.fill_(1.0)
    engine = TransferEngine([memory_of(pool, arena)], MonotonicClock())
    try:
        return _copies(engine, rounds, layout)
    finally:
        engine.close()


def _copies(engine: TransferEngine, rounds: int, layout: PageLayout) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    num_bytes = NUM_PAGES * SPEC.page_bytes
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    quads: dict[TransferKind, list[Quad]] = {
        TransferKind.BACKUP_HOST: [],
        TransferKind.LOAD_BACK: [],
    }
    for turn in range(-1, rounds):  # the first only warms up
        slots = [rng.permutation(layout.num_pages)[:NUM_PAGES] for _ in range(2)]
        for kind, mine in quads.items():
            copy = partial(_move, engine, kind, *slots)
            sample = quad(lambda: np.copyto(target, source), copy, turn)
            if turn >= 0:
                mine.append(sample)
    backup = ratio_result("backup_over_memcpy", quads[TransferKind.BACKUP_HOST])
    load = ratio_result("load_over_memcpy", quads[TransferKind.LOAD_BACK])
    both = [backup["value"], load["value"]]
    speeds = [
        round(2 * num_bytes / each.other_s / 1e9, 3) for mine in quads.values() for each in mine
    ]
    return [
        _result("host_copy_over_memcpy", min(both), both),
        backup,
        load,
        result("memcpy_gb_per_s", statistics.median(speeds), speeds, "GB/s"),
    ]


def _move(engine: TransferEngine, kind: TransferKind, device: Any, host: Any) -> None:
    engine.submit(Transfer(id=1, kind=kind, device=device, host=host))
    engine.wait(PATIENCE_S)
    (result,) = engine.poll()
    assert result.done.all(), f"{kind.value} failed: {result.error}"


def measure_overlap(rounds: int, model: str = "smollm2") -> list[dict[str, Any]]:
    """`overlap_over_larger`: a step that reads a load whose every layer takes as long as its own
    computation, over the larger of the two alone. `hidden_fraction`: the load's part unseen."""
    delay = _Delay()
    with _worker(model, delay) as loaded:
        rig = _StepRig(loaded)
        computed = statistics.median(rig.step(load=False) for _ in range(5))
        delay.seconds = computed / loaded.spec.num_layers
        samples: dict[str, list[float]] = {"compute_s": [], "load_s": [], "both_s": []}
        for index in range(rounds):
            runs: list[tuple[str, Callable[[], float]]] = [
                ("compute_s", lambda: rig.step(load=False)),
                ("load_s", rig.load_alone),
                ("both_s", lambda: rig.step(load=True)),
            ]
            for name, run in runs if index % 2 else runs[::-1]:
                samples[name].append(run())
    triples = list(zip(*(samples[n] for n in ("compute_s", "load_s", "both_s")), strict=True))
    over = [both / max(compute, load) for compute, load, both in triples]
    hidden = [(compute + load - both) / min(compute, load) for compute, load, both in triples]
    return [
        _result("overlap_over_larger", statistics.median(over), samples),
        _result("hidden_fraction", statistics.median(hidden), hidden),
    ]


class _Delay:
    """Makes each layer of a load take `seconds`, without using a processor."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._never = threading.Event()

    def before_chunk(self, _transfer: Transfer, _position: int) -> None:
        self._never.wait(self.seconds)


@contextmanager
def _worker(model: str, delay: _Delay) -> Iterator[LoadedWorker]:
    options = WorkerOptions(
        dtype="bf16",
        num_pages=POOL_PAGES,
        host_pages=OVERLAP_PAGES,
        max_model_len=(OVERLAP_PAGES + 1) * SPEC.page_size + OVERLAP_TOKENS,
        threads=1,  # the load's thread has the other processor, as far as it needs one
        inline=True,
        transfer_hooks=TransferHooks(before_chunk=delay.before_chunk, whole_layers=True),
    )
    loaded = load_worker(resolve_model(model).path, options)
    try:
        yield loaded
    finally:
        loaded.worker.close()
        assert loaded.transfers is not None, "asked for above"
        loaded.transfers.close()


class _StepRig:
    """Steps of one request: cached pages, then `OVERLAP_TOKENS` new tokens."""

    def __init__(self, loaded: LoadedWorker) -> None:
        assert isinstance(loaded.worker, InlineWorker), "asked for above"
        assert loaded.transfers is not None, "asked for above"
        self._worker, self._engine = loaded.worker, loaded.transfers
        page_size = loaded.spec.page_size
        self._start = OVERLAP_PAGES * page_size
        rng = random.Random(0)
        ids = [rng.randrange(100, 1000) for _ in range(self._start + OVERLAP_TOKENS)]
        self._tokens = tokens_to_bytes(ids)
        self._refs = np.arange(OVERLAP_PAGES + OVERLAP_TOKENS // page_size, dtype=np.int64)
        self._host = np.arange(OVERLAP_PAGES, dtype=np.int64)
        self._next = 0
        self._step = 0

    def load_alone(self) -> float:
        """Seconds of a load that nobody waits for per layer."""
        return _timed(lambda: self._finish(self._submit()))

    def step(self, *, load: bool) -> float:
        """Seconds of one step, with a load of its cached pages submitted together with it."""
        plan = self._plan()
        started = time.perf_counter()
        if load:
            number = self._submit()
            plan = self._plan(number)
        self._worker.submit(plan)
        self._worker.collect()
        seconds = time.perf_counter() - started
        if load:
            self._finish(number)
        return seconds

    def _submit(self) -> int:
        self._next += 1
        refs = self._refs[:OVERLAP_PAGES]
        self._engine.submit(
            Transfer(id=self._next, kind=TransferKind.LOAD_BACK, device=refs, host=self._host)
        )
        return self._next

    def _finish(self, number: int) -> None:
        self._engine.wait(PATIENCE_S)
        (result,) = self._engine.poll()
        assert result.id == number, "one load at a time"
        assert result.done.all(), result.error

    def _plan(self, *loads: int) -> StepPlan:
        self._step += 1
        init = RowInit(
            row=0,
            serial=self._step,
            sampling=SamplingParams(temperature=0.0),
            seed=0,
            stop_ids=(),
            tokens=self._tokens,
            num_prompt_tokens=len(self._tokens) // 4,
        )
        row = RowPlan(
            row=0,
            serial=self._step,
            start=self._start,
            count=OVERLAP_TOKENS,
            tokens=self._tokens[4 * self._start :],
            sample=True,
        )
        return StepPlan(
            step=self._step,
            rows=(row,),
            admitted=(init,),
            table_updates=(PageTableUpdate(row=0, first_page=0, refs=self._refs),),
            loads=loads,
        )


def _timed(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _result(name: str, value: float, samples: Any) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "unit": "ratio", "samples": samples}
