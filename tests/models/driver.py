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


class _Capture:
    """Logits by serial and position."""

    def __init__(self) -> None:
        self.logits: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)

    def __call__(self, serial: int, start: int, logits: torch.Tensor) -> None:
        for i, row in enumerate(logits):
            self.logits[serial][start + i] = row.clone()


def load(path: object, *, page_size: int, **options: Any) -> tuple[LoadedWorker, _Capture]:
    """An inline fp32 worker that captures logits and poisons freed pages with NaN."""
    capture = _Capture()
    defaults = {"dtype": "fp32", "num_pages": 64 + 512 // page_size, "inline": True, "threads": 1}
    hooks = Hooks(capture_logits=capture, nan_fill=True)
    chosen = WorkerOptions(page_size=page_size, hooks=hooks, **{**defaults, **options})
    return load_worker(Path(str(path)), chosen), capture


class Driver:
    """Gives out pages in a scrambled order; every page is NaN before its first use."""

    def __init__(self, loaded: tuple[LoadedWorker, _Capture]) -> None:
        self.loaded, self.capture = loaded
        self.worker = self.loaded.worker
        self.page_size = self.loaded.spec.page_size
        order = np.random.default_rng(5).permutation(self.loaded.num_pages[0]).astype(np.int64)
        self._free = order.tolist()
        self._pages: dict[int, np.ndarray] = {}
        self._ends: dict[int, int] = {}
        self.sampled: dict[int, list[int]] = defaultdict(list)
        self._step = 0
        self._run(StepPlan(step=-1, rows=(), freed_pages=order))

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
        """Give a row to a request, with pages for its prompt and `room` more tokens."""
        num_pages = -(-(len(ids) + room) // self.page_size)
        shared = shared_tokens // self.page_size
        own = [self._free.pop() for _ in range(num_pages - shared)]
        head = NO_REFS if shared_with is None else self._pages[shared_with][:shared]
        refs = np.concatenate([head, np.array(own, dtype=np.int64)])
        self._pages[row] = refs
        self.sampled[row] = []
        init = RowInit(
            row=row,
            serial=100 + row,
            sampling=sampling,
            seed=extra.get("seed", 0),
            stop_ids=extra.get("stop_ids", ()),
            tokens=tokens_to_bytes(ids),
            num_prompt_tokens=extra.get("num_prompt_tokens", len(ids)),
        )
        update = PageTableUpdate(row=row, first_page=0, refs=refs)
        self._run(StepPlan(step=-1, rows=(), admitted=(init,), table_updates=(update,)))

    def chunk(
        self, row: int, ids: list[int], start: int, end: int, *, sample: bool = False
    ) -> RowPlan:
        """Compute ids[start:end] of a row's prompt."""
        self._ends[row] = end
        return RowPlan(
            row=row,
            serial=100 + row,
            start=start,
            count=end - start,
            tokens=tokens_to_bytes(ids[start:end]),
            sample=sample,
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
        result = self._run(StepPlan(step=self._step, rows=rows))
        self._step += 1
        for row in result.rows:
            self.sampled[row.row].append(row.token)
        return result

    def logits_of(self, row: int) -> torch.Tensor:
        """All captured logits of a row, by position."""
        by_position = self.capture.logits[100 + row]
        return torch.stack([by_position[pos] for pos in sorted(by_position)])

    def _run(self, plan: StepPlan) -> StepResult:
        self.worker.submit(plan)
        return self.worker.collect()
