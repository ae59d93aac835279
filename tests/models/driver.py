"""Drives a worker by hand-written plans, as a scheduler would, and collects its logits."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phloem.core.plan import PageTableUpdate, RowInit, RowPlan, StepPlan, StepResult
from phloem.core.refs import NO_REFS
from phloem.core.request import SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.worker import Hooks, LoadedWorker, WorkerOptions, load_worker

GREEDY = SamplingParams(temperature=0.0, max_tokens=10_000)
FULL, WINDOW = 0, 1


class _Capture:
    """Logits by serial and position."""

    def __init__(self) -> None:
        self.logits: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)

    def __call__(self, serial: int, start: int, logits: torch.Tensor) -> None:
        for i, row in enumerate(logits):
            self.logits[serial][start + i] = row.clone()

    def forget(self, serial: int) -> None:
        """A row has a new tenant."""
        self.logits.pop(serial, None)


def load(path: object, *, page_size: int, **options: Any) -> tuple[LoadedWorker, _Capture]:
    """An inline fp32 worker that captures logits and poisons freed pages with NaN."""
    capture = _Capture()
    defaults = {"dtype": "fp32", "num_pages": 64 + 512 // page_size, "inline": True, "threads": 1}
    hooks = Hooks(capture_logits=capture, nan_fill=True)
    chosen = WorkerOptions(page_size=page_size, hooks=hooks, **{**defaults, **options})
    return load_worker(Path(str(path)), chosen), capture


class Driver:
    """Gives out pages in a scrambled order; every page is NaN before its first use.

    One page of the window component is never given out: entries of a window table that nobody may
    read point at it.
    """

    def __init__(self, loaded: tuple[LoadedWorker, _Capture]) -> None:
        self.loaded, self.capture = loaded
        self.worker = self.loaded.worker
        self.page_size = self.loaded.spec.page_size
        rng = np.random.default_rng(5)
        orders = [rng.permutation(count).astype(np.int64) for count in self.loaded.num_pages]
        self._free = [order.tolist() for order in orders]
        self._absent = self._free[WINDOW].pop() if len(orders) > 1 else -1
        self._pages: dict[tuple[int, int], np.ndarray] = {}  # by (row, component)
        self._ends: dict[int, int] = {}
        self._restarts: dict[int, tuple[int, int]] = {}  # write_from, window_from
        self._freed: list[int] = []  # window pages, poisoned with the next plan
        self.sampled: dict[int, list[int]] = defaultdict(list)
        self._step = 0
        freed = dict(zip(("freed_pages", "freed_window_pages"), orders, strict=False))
        self._run(StepPlan(step=-1, rows=(), **freed))

    def admit(
        self,
        row: int,
        ids: list[int],
        *,
        sampling: SamplingParams = GREEDY,
        room: int = 32,
        shared_with: int | None = None,
        shared_tokens: int = 0,
        **extra: Any,
    ) -> None:
        """Give a row to a request, with pages for its prompt and `room` more tokens.

        The first `shared_tokens` are in pages of another row, in both components.
        """
        num_pages = -(-(len(ids) + room) // self.page_size)
        shared = shared_tokens // self.page_size
        tables = []
        for component in range(len(self._free)):
            head = NO_REFS if shared_with is None else self._pages[shared_with, component][:shared]
            tables.append(np.concatenate([head, self._take(component, num_pages - shared)]))
        self._admit(row, ids, tables, sampling, **extra)

    def restart(
        self, row: int, ids: list[int], *, kept: int, start: int, tail: int = 0, source: int = 0
    ) -> None:
        """Give a row to a request whose full pages [0, kept) another row holds, and of whose window
        pages only the `tail` before page `start` are alive (0: no page at all).

        It begins at page `start`: from there on its window pages are its own.
        """
        size = self.page_size
        num_pages = -(-len(ids) // size)
        own = self._take(FULL, num_pages - kept)
        full = np.concatenate([self._pages[source, FULL][:kept], own])
        window = np.full(num_pages, self._absent, dtype=np.int64)
        window[start - tail : start] = self._pages[source, WINDOW][start - tail : start]
        window[start:] = self._take(WINDOW, num_pages - start)
        self._admit(row, ids, [full, window], GREEDY)
        self._restarts[row] = (kept * size, 0 if tail or start == 0 else start * size)

    def release(self, row: int, *, shared_pages: int = 0) -> None:
        """Free a row's pages but for the first ones, which are not its own."""
        full = self._pages.pop((row, FULL))[shared_pages:]
        window = self._pages.pop((row, WINDOW))
        own = window[(window != self._absent) & ~np.isin(window, self._pages[0, WINDOW])]
        self._free[FULL] += full.tolist()
        self._free[WINDOW] += own.tolist()
        self._run(StepPlan(step=-1, rows=(), released=(row,), freed_pages=full))
        self._run(StepPlan(step=-1, rows=(), freed_window_pages=own))

    def slide(self, row: int, window: int) -> None:
        """Free a row's window pages that no later token reads; they are NaN from the next step on,
        and given to others."""
        table = self._pages[row, WINDOW]
        gone = max(0, self._ends[row] - window + 1) // self.page_size
        old = table[:gone][table[:gone] != self._absent]
        self._freed += old.tolist()
        self._free[WINDOW][:0] = old.tolist()
        table[:gone] = self._absent

    def refs(self, row: int, component: int) -> np.ndarray:
        """A row's pages of a component."""
        return self._pages[row, component]

    def page(self, row: int, number: int, component: int) -> torch.Tensor:
        """The elements of one page of a row."""
        data = self.worker.read_page(int(self._pages[row, component][number]), component)
        return torch.from_numpy(np.frombuffer(data, dtype=np.float32).copy())

    def chunk(
        self, row: int, ids: list[int], start: int, end: int, *, sample: bool = False
    ) -> RowPlan:
        """Compute ids[start:end] of a row's prompt."""
        self._ends[row] = end
        write_from, window_from = self._restarts.get(row, (0, 0))
        return RowPlan(
            row=row,
            serial=100 + row,
            start=start,
            count=end - start,
            tokens=tokens_to_bytes(ids[start:end]),
            sample=sample,
            write_from=write_from,
            window_from=window_from,
        )

    def decode(self, row: int) -> RowPlan:
        """Compute a row's last sampled token, as a future, and sample the next one."""
        start = self._ends[row]
        self._ends[row] += 1
        return RowPlan(
            row=row,
            serial=100 + row,
            start=start,
            count=1,
            tokens=None,
            sample=True,
            output_index=len(self.sampled[row]),
        )

    def step(self, *rows: RowPlan) -> StepResult:
        """Run one step and note what was sampled."""
        freed, self._freed = np.array(self._freed, dtype=np.int64), []
        result = self._run(StepPlan(step=self._step, rows=rows, freed_window_pages=freed))
        self._step += 1
        for row in result.rows:
            self.sampled[row.row].append(row.token)
        return result

    def prefill(self, row: int, ids: list[int], start: int, chunk: int, *, window: int = 0) -> None:
        """Compute ids[start:] in chunks; with `window`, let go of pages behind each of them."""
        for low in range(start, len(ids), chunk):
            high = min(low + chunk, len(ids))
            self.step(self.chunk(row, ids, low, high, sample=high == len(ids)))
            if window:
                self.slide(row, window)

    def logits_of(self, row: int) -> torch.Tensor:
        """All captured logits of a row, by position."""
        by_position = self.capture.logits[100 + row]
        return torch.stack([by_position[pos] for pos in sorted(by_position)])

    def _take(self, component: int, count: int) -> np.ndarray:
        return np.array([self._free[component].pop() for _ in range(count)], dtype=np.int64)

    def _admit(
        self, row: int, ids: list[int], tables: list[np.ndarray], sampling: Any, **extra: Any
    ) -> None:
        self.sampled[row] = []
        self._restarts.pop(row, None)
        self.capture.forget(100 + row)
        init = RowInit(
            row=row,
            serial=100 + row,
            sampling=sampling,
            seed=extra.get("seed", 0),
            stop_ids=extra.get("stop_ids", ()),
            tokens=tokens_to_bytes(ids),
            num_prompt_tokens=extra.get("num_prompt_tokens", len(ids)),
        )
        updates = []
        for component, refs in enumerate(tables):
            self._pages[row, component] = refs
            updates.append(PageTableUpdate(row=row, first_page=0, refs=refs, component=component))
        self._run(StepPlan(step=-1, rows=(), admitted=(init,), table_updates=tuple(updates)))

    def _run(self, plan: StepPlan) -> StepResult:
        self.worker.submit(plan)
        return self.worker.collect()
