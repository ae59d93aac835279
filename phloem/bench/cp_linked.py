"""Two ranks, with a simulated link between them or without, driven step by step: threads of one
process."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from phloem.bench.cp_engines import random_prompt
from phloem.core.plan import PageTableUpdate, RowInit, RowPlan, StepPlan
from phloem.core.refs import make_ref
from phloem.core.remote import LinkRates, RemoteWays
from phloem.core.request import SamplingParams
from phloem.core.tokens import TOKEN_BYTES, tokens_to_bytes
from phloem.groups import Link
from phloem.worker import RankedWorker, WorkerOptions, load_local_ranks

__all__ = ["PAGE_SIZE", "LinkedRanks", "open_linked", "open_pair", "row_of"]

PAGE_SIZE = 16


class LinkedRanks:
    """Two ranks and one row, whose pages are striped and written anew by every prefill."""

    def __init__(self, worker: RankedWorker, link: Link, length: int, chunk: int) -> None:
        self._worker, self.link, self._length, self._chunk = worker, link, length, chunk
        self._rng = random.Random(length)
        self._step = 0
        self._serial = 0  # of the prompt whose pages are there

    def measure(self) -> LinkRates:
        """What the ranks find out of themselves and of the link, before the first step."""
        return self._worker.measure()

    def prefill(self, ways: RemoteWays) -> float:
        """Seconds of all chunks, one step each."""
        tokens = tokens_to_bytes(random_prompt(self._rng, self._length))
        started = time.perf_counter()
        for low in range(0, self._length, self._chunk):
            self._worker.submit(self._plan(tokens, low, ways))
            self._worker.collect()
        return time.perf_counter() - started

    def bytes_of(self, ways: RemoteWays, *, cached: int, new: int) -> int:
        """What travels, to both ranks, in a step of `new` tokens after `cached` ones."""
        before = self.link.carried.total()
        self.step(ways, cached=cached, new=new)
        return self.link.carried.total() - before

    def step(self, ways: RemoteWays, *, cached: int, new: int) -> float:
        """Seconds of a step of `new` tokens after `cached` ones, which are there."""
        row = RowPlan(
            row=0,
            serial=self._serial,
            start=cached,
            count=new,
            tokens=tokens_to_bytes(random_prompt(self._rng, new)),
            sample=False,
        )
        plan = StepPlan(step=self._step, rows=(row,), remote=ways)
        self._step += 1
        started = time.perf_counter()
        self._worker.submit(plan)
        self._worker.collect()
        return time.perf_counter() - started

    def _plan(self, tokens: bytes, low: int, ways: RemoteWays) -> StepPlan:
        high = min(low + self._chunk, self._length)
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
            admitted=(row_of(row.serial, tokens),) if first else (),
            table_updates=(self._pages(),) if first else (),
            released=(0,) if first and self._step else (),
            remote=ways,
        )
        self._step += 1
        return plan

    def _pages(self) -> PageTableUpdate:
        refs = [make_ref(page % 2, page // 2) for page in range(self._length // PAGE_SIZE)]
        return PageTableUpdate(row=0, first_page=0, refs=np.array(refs, dtype=np.int64))


def row_of(serial: int, tokens: bytes) -> RowInit:
    """The one row takes a prompt."""
    return RowInit(
        row=0,
        serial=serial,
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        stop_ids=(),
        tokens=tokens,
        num_prompt_tokens=len(tokens) // TOKEN_BYTES,
    )


@contextmanager
def open_linked(model: Path, length: int, *, chunk: int) -> Iterator[LinkedRanks]:
    """Over a model of `length` tokens; at first the link takes no time."""
    link = Link()
    with open_pair(
        model, length, chunk=chunk, num_pages=length // PAGE_SIZE // 2, link=link
    ) as pair:
        yield LinkedRanks(pair, link, length, chunk)


@contextmanager
def open_pair(
    model: Path, length: int, *, chunk: int, num_pages: int, link: Link | None = None
) -> Iterator[RankedWorker]:
    """Two ranks of one thread and `num_pages` each, and one row of up to `length` tokens."""
    options = WorkerOptions(
        dtype="bf16",
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_running=1,
        max_model_len=length,
        max_prefill_tokens=chunk,
        threads=1,
    )
    worker = load_local_ranks(model, options, 2, link=link).worker
    assert isinstance(worker, RankedWorker), "several ranks"
    try:
        yield worker
    finally:
        worker.close()
