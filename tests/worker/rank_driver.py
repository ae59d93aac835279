"""Drives ranks by hand-written plans: rows whose pages are divided among owners, and what they
answer, by serial and position."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from phloem.core.plan import PageTableUpdate, RowInit, RowPlan, StepPlan, StepResult
from phloem.core.protocols import Worker
from phloem.core.refs import NO_REFS, make_ref, owner_of, slot_of
from phloem.core.remote import IN_PLACE, RemoteWays
from phloem.core.request import SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.worker import Hooks

__all__ = ["Logits", "RankDriver", "striped"]

GREEDY = SamplingParams(temperature=0.0, max_tokens=10_000)

Owner = Callable[[int, int], int]  # (row, page) -> owner


class Logits:
    """Captured by all ranks, each position by one of them: (serial, position) -> (V,)."""

    def __init__(self) -> None:
        self.of: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        self.ranks: dict[int, dict[int, int]] = defaultdict(dict)
        self._lock = threading.Lock()

    def hooks(self, rank: int) -> Hooks:
        """For one rank. Freed pages are NaN."""

        def capture(serial: int, start: int, logits: torch.Tensor) -> None:
            with self._lock:
                for i, row in enumerate(logits):
                    self.of[serial][start + i] = row.clone()
                    self.ranks[serial][start + i] = rank

        return Hooks(capture_logits=capture, nan_fill=True)

    def stacked(self, serial: int) -> torch.Tensor:
        """(positions, V), in order."""
        return torch.stack([self.of[serial][at] for at in sorted(self.of[serial])])


def striped(size: int) -> Owner:
    """Row r's page i on rank (r + i) mod size."""
    return lambda row, page: (row + page) % size


class RankDriver:
    """Gives out pages of `size` owners in a scrambled order; every page is NaN before first use.

    `ways`: how the steps read remote pages, one after the other, over and over.
    """

    ways: tuple[RemoteWays, ...] = (IN_PLACE,)

    def __init__(
        self, worker: Worker, owner: Owner, *, size: int, num_pages: int, page_size: int
    ) -> None:
        self.worker, self.owner, self.page_size = worker, owner, page_size
        rng = np.random.default_rng(5)
        orders = [rng.permutation(num_pages).tolist() for _ in range(size)]
        self._free = orders
        self._tables: dict[int, list[int]] = {}
        self._ends: dict[int, int] = {}
        self.sampled: dict[int, list[int]] = defaultdict(list)
        self._step = 0
        everything = [make_ref(o, slot) for o, slots in enumerate(orders) for slot in slots]
        self._freed = list(everything)
        self._admitted: list[RowInit] = []
        self._updates: list[PageTableUpdate] = []
        self._released: list[int] = []

    def admit(
        self,
        row: int,
        ids: list[int],
        *,
        sampling: SamplingParams = GREEDY,
        room: int = 32,
        shared_with: int | None = None,
        shared_pages: int = 0,
        **extra: Any,
    ) -> None:
        """With the next step: a row for a request, with pages for `room` more tokens."""
        count = -(-(len(ids) + room) // self.page_size)
        head = [] if shared_with is None else self._tables[shared_with][:shared_pages]
        own = [self._take(self.owner(row, page)) for page in range(shared_pages, count)]
        self._tables[row] = [*head, *own]
        self.sampled[row] = []
        refs = np.array(self._tables[row], dtype=np.int64)
        self._admitted.append(
            RowInit(
                row=row,
                serial=100 + row,
                sampling=sampling,
                seed=extra.get("seed", 0),
                stop_ids=(),
                tokens=tokens_to_bytes(ids),
                num_prompt_tokens=len(ids),
            )
        )
        self._updates.append(PageTableUpdate(row=row, first_page=0, refs=refs))

    def release(self, row: int) -> None:
        """With the next step: its pages are free, and NaN until somebody writes them."""
        for ref in self._tables.pop(row):
            self._free[owner_of(ref)].insert(0, slot_of(ref))
            self._freed.append(ref)
        self._released.append(row)

    def chunk(self, row: int, ids: list[int], start: int, end: int) -> RowPlan:
        """Compute ids[start:end]; sample at the end of the prompt."""
        self._ends[row] = end
        return RowPlan(
            row=row,
            serial=100 + row,
            start=start,
            count=end - start,
            tokens=tokens_to_bytes(ids[start:end]),
            sample=end == len(ids),
        )

    def decode(self, row: int, index: int | None = None) -> RowPlan:
        """Compute a row's last sampled token, a future, and sample the next."""
        start = self._ends[row]
        self._ends[row] += 1
        index = len(self.sampled[row]) if index is None else index
        return RowPlan(
            row=row,
            serial=100 + row,
            start=start,
            count=1,
            tokens=None,
            sample=True,
            output_index=index,
        )

    def submit(self, *rows: RowPlan, **more: Any) -> None:
        freed = np.array(self._freed, dtype=np.int64) if self._freed else NO_REFS
        plan = StepPlan(
            step=self._step,
            rows=rows,
            admitted=tuple(self._admitted),
            table_updates=tuple(self._updates),
            released=tuple(self._released),
            freed_pages=freed,
            remote=self.ways[self._step % len(self.ways)],
            **more,
        )
        self._step += 1
        self._freed, self._admitted, self._updates, self._released = [], [], [], []
        self.worker.submit(plan)

    def collect(self) -> StepResult:
        result = self.worker.collect()
        for row in result.rows:
            assert row.error is None, row.error
            self.sampled[row.row].append(row.token)
        return result

    def step(self, *rows: RowPlan, **more: Any) -> StepResult:
        """One step, alone in flight."""
        self.submit(*rows, **more)
        return self.collect()

    def _take(self, owner: int) -> int:
        return make_ref(owner, self._free[owner].pop())
