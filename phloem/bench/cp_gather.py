"""Pages that travel over a simulated link, and how much of that hides behind the computing.

Two ranks, threads of one process with one thread of products each, prefill 16K new tokens of a
model of SmolLM2's shape with random weights and NUM_LAYERS layers. The link takes time by the byte,
so much that all bytes of the prefill, one after the other, take UNOVERLAPPED of the time that the
same prefill takes where pages are read in place.

    gather_cost_16k_simulated_link   gather_kv over that link, over reading in place, less one
    gather_copies_16k                the same without a link: what the copies alone cost
    hidden_fraction                  of the link's time, what the prefill does not take longer
    send_q_bytes_saving              bytes that gather_kv moves over those of send_q, counted, in a
                                     step of 64 new tokens on 8K cached ones
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from phloem.bench.cp_engines import random_prompt, write_random_model
from phloem.bench.report import Result
from phloem.core.plan import PageTableUpdate, RowInit, RowPlan, StepPlan
from phloem.core.refs import make_ref
from phloem.core.remote import Remote
from phloem.core.request import SamplingParams
from phloem.core.tokens import TOKEN_BYTES, tokens_to_bytes
from phloem.groups import Link
from phloem.worker import RankedWorker, WorkerOptions, load_local_ranks

__all__ = ["measure_gather"]

NUM_LAYERS = 2
PAGE_SIZE, CHUNK = 16, 2048
UNOVERLAPPED = 0.2
NEW, CACHED = 64, 8192


class _Ranks:
    """Two ranks and one row, whose pages are striped and written anew by every prefill."""

    def __init__(self, worker: RankedWorker, link: Link, length: int) -> None:
        self._worker, self.link, self._length = worker, link, length
        self._rng = random.Random(length)
        self._step = 0
        self._serial = 0  # of the prompt whose pages are there

    def prefill(self, remote: Remote) -> float:
        """Seconds of all chunks, one step each."""
        tokens = tokens_to_bytes(random_prompt(self._rng, self._length))
        started = time.perf_counter()
        for low in range(0, self._length, CHUNK):
            self._worker.submit(self._plan(tokens, low, remote))
            self._worker.collect()
        return time.perf_counter() - started

    def bytes_of(self, remote: Remote) -> int:
        """What travels, to both ranks, in a step of NEW tokens after CACHED that are there."""
        before = self.link.carried.total()
        row = RowPlan(
            row=0,
            serial=self._serial,
            start=CACHED,
            count=NEW,
            tokens=tokens_to_bytes(random_prompt(self._rng, NEW)),
            sample=False,
        )
        self._worker.submit(StepPlan(step=self._step, rows=(row,), remote=remote))
        self._worker.collect()
        self._step += 1
        return self.link.carried.total() - before

    def _plan(self, tokens: bytes, low: int, remote: Remote) -> StepPlan:
        high = min(low + CHUNK, self._length)
        first = low == 0
        if first:
            self._serial += 1
        row = RowPlan(
            row=0,
            serial=self._serial,
            start=low,
            count=high - low,
            tokens=tokens[low * TOKEN_BYTES : high * TOKEN_BYTES],
            sample=high == self._length,
        )
        plan = StepPlan(
            step=self._step,
            rows=(row,),
            admitted=(self._init(row.serial, tokens),) if first else (),
            table_updates=(self._pages(),) if first else (),
            released=(0,) if first and self._step else (),
            remote=remote,
        )
        self._step += 1
        return plan

    def _init(self, serial: int, tokens: bytes) -> RowInit:
        return RowInit(
            row=0,
            serial=serial,
            sampling=SamplingParams(temperature=0.0),
            seed=0,
            stop_ids=(),
            tokens=tokens,
            num_prompt_tokens=self._length,
        )

    def _pages(self) -> PageTableUpdate:
        refs = [make_ref(page % 2, page // 2) for page in range(self._length // PAGE_SIZE)]
        return PageTableUpdate(row=0, first_page=0, refs=np.array(refs, dtype=np.int64))


def measure_gather(*, quick: bool = False) -> list[Result]:
    """About four minutes (quick: half a minute, 10K tokens)."""
    length, rounds = (10240, 2) if quick else (16384, 8)
    with tempfile.TemporaryDirectory(prefix="phloem-cp-") as folder:
        model = write_random_model(Path(folder), num_layers=NUM_LAYERS)
        with _open(model, length) as ranks:
            samples = [_round(ranks) for _ in range(rounds)]
            saving = ranks.bytes_of(Remote.GATHER_KV) / ranks.bytes_of(Remote.SEND_Q)
    costs, copies, hidden = (list(each) for each in zip(*samples, strict=True))
    return [
        _result("gather_cost_16k_simulated_link", costs),
        _result("gather_copies_16k", copies),
        _result("hidden_fraction", hidden),
        Result(name="send_q_bytes_saving", value=round(saving, 2), unit="ratio"),
    ]


def _round(ranks: _Ranks) -> tuple[float, float, float]:
    direct_s = ranks.prefill(Remote.DIRECT)
    ranks.link.carried.clear()
    free_s = ranks.prefill(Remote.GATHER_KV)
    budget_s = UNOVERLAPPED * direct_s
    ranks.link.bytes_s = max(ranks.link.carried.values()) / budget_s
    linked_s = ranks.prefill(Remote.GATHER_KV)
    ranks.link.bytes_s = float("inf")
    return linked_s / direct_s - 1, free_s / direct_s - 1, 1 - (linked_s - free_s) / budget_s


def _result(name: str, samples: list[float]) -> Result:
    return Result(
        name=name,
        value=round(statistics.median(samples), 4),
        unit="ratio",
        samples=[round(sample, 4) for sample in samples],
    )


@contextmanager
def _open(model: Path, length: int) -> Iterator[_Ranks]:
    link = Link()
    options = WorkerOptions(
        dtype="bf16",
        page_size=PAGE_SIZE,
        num_pages=length // PAGE_SIZE // 2,
        max_running=1,
        max_model_len=length,
        max_prefill_tokens=CHUNK,
        threads=1,
    )
    worker = load_local_ranks(model, options, 2, link=link).worker
    assert isinstance(worker, RankedWorker), "several ranks"
    try:
        yield _Ranks(worker, link, length)
    finally:
        worker.close()
