"""A worker with page memory and no weights.

It keeps what a real worker keeps - page tables by row, changed by deltas only, and the token
buffer that futures are read from - and a memory of one cell per (slot, offset). Computing a token
writes (id, position) into its cell; attending reads every cell from 0 on through the page table.
So a wrong page, a stale table entry, a page given away too early, or KV that nobody computed
raises PageFault or changes the answer. Freed pages are poisoned at once.

With several owners it stands for all ranks together: their pools lie side by side in one memory, as
on one machine, and a token whose window page is not on the rank that computes it, the owner of its
full page, is a PageFault.

With a `FakeWindow` there are window pages too, with cells that also know how *right* they are (see
`sim.window`): a window layer that reads a page which was freed or never written raises PageFault,
and so does anything that is shared or sampled although a restart was not low enough for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from phloem.core.plan import RowInit, RowPlan, RowResult, StepPlan, StepResult
from phloem.core.refs import flat_slots
from phloem.core.tokens import tokens_from_bytes, tokens_to_bytes
from phloem.sim.fake_replicas import FakeReplicas
from phloem.sim.models import NextToken, choose
from phloem.sim.transfers import SimTransfers
from phloem.sim.window import FakeWindow, PageFault, WindowMemory

__all__ = ["FakeWorker"]

_POISON = -1
_NO_CELL = -1  # where a page table has no page yet
_POSITION_SHIFT = 32  # a cell is position << 32 | id


class _Row:
    """One row of the worker's tables: cells[p] is where position p lives."""

    __slots__ = ("cells", "init", "num_known", "tokens", "window_cells")

    def __init__(self, init: RowInit, max_model_len: int, page_size: int) -> None:
        num_pages = -(-max_model_len // page_size)
        self.init = init
        self.cells = np.full(num_pages * page_size, _NO_CELL, dtype=np.int64)
        self.window_cells = np.full(num_pages * page_size, _NO_CELL, dtype=np.int64)
        self.tokens = np.zeros(max_model_len + 1, dtype=np.int32)  # + the last sampled one
        known = tokens_from_bytes(init.tokens)
        self.tokens[: len(known)] = known
        self.num_known = len(known)


class FakeWorker:
    """Implements `core.protocols.Worker`. Steps run late, when they are collected.

    `num_pages` are those of each owner, as are `window.num_pages`.
    `fail_row(serial, output_index)` returns an error text to make that row fail, else None.
    """

    def __init__(
        self,
        model: NextToken,
        *,
        num_pages: int,
        num_owners: int = 1,
        page_size: int,
        max_running: int,
        max_model_len: int,
        fail_row: Callable[[int, int], str | None] = lambda serial, index: None,  # noqa: ARG005
        window: FakeWindow | None = None,
    ) -> None:
        self.gate: SimTransfers | None = None  # what loads pages into `memory`, if anything does
        self._void: set[int] = set()  # serials of rows that read pages of a failed load
        self.max_step_tokens = 0  # the largest step so far
        self._model = model
        self._page_size = page_size
        self._max_model_len = max_model_len
        self._fail_row = fail_row
        self._num_pages = num_pages
        self._num_owners = num_owners
        self._cells = np.full((num_owners * num_pages, page_size), _POISON, dtype=np.int64)
        self._flat = self._cells.reshape(-1)  # the same memory
        self.replicas = FakeReplicas(self._cells, num_pages, _POISON)
        self._positions = np.arange(max_model_len, dtype=np.int64)
        self._rows: list[_Row | None] = [None] * max_running
        self._queue: deque[StepPlan] = deque()
        self._last_step = -1
        self._window = None if window is None else WindowMemory(window, page_size, num_owners)

    @property
    def memory(self) -> npt.NDArray[np.int64]:
        """The pages' cells, (owners, pages, page_size), for transfers to read and write."""
        return self._cells.reshape(self._num_owners, self._num_pages, self._page_size)

    @property
    def memories(self) -> tuple[npt.NDArray[np.int64], ...]:
        """The same for every component."""
        if self._window is None:
            return (self.memory,)
        cells = self._window.cells
        return self.memory, cells.reshape(self._num_owners, -1, self._page_size)

    def submit(self, plan: StepPlan) -> None:
        assert len(self._queue) < 2, "at most two plans may be in flight"
        self._queue.append(plan)

    def collect(self) -> StepResult:
        plan = self._queue.popleft()
        assert plan.step == self._last_step + 1, f"step {plan.step} after {self._last_step}"
        self._last_step = plan.step
        self._change_tables(plan)
        if plan.loads:
            assert self.gate is not None, "a plan names loads, and nothing loads"
            self.gate.wait_layer(plan.loads, 0)
            if self.gate.failed.intersection(plan.loads):  # any row may be one of theirs
                self._void.update(row.serial for row in plan.rows)
        for row in plan.rows:  # all writes come before all reads, as in a layer
            self._write(row)
        if self._window is not None:
            for row in plan.rows:
                self._attend_window(row, self._window)
        outcomes = [self._attend(row) for row in plan.rows]
        self.replicas.end(plan.replicas)
        self.max_step_tokens = max(self.max_step_tokens, plan.num_tokens)
        return StepResult(step=plan.step, rows=tuple(o for o in outcomes if o is not None))

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002
        return True  # a step is computed when it is collected

    def cancel(self, serial: int) -> None:
        """Every step is computed whole."""

    def close(self) -> None:
        self._queue.clear()

    def _change_tables(self, plan: StepPlan) -> None:
        for row in plan.released:
            assert self._rows[row] is not None, f"row {row} is released but was free"
            self._rows[row] = None
        self._cells[flat_slots(plan.freed_pages, self._num_pages)] = _POISON
        if self._window is not None:
            self._window.free(plan.freed_window_pages)
        for init in plan.admitted:
            assert self._rows[init.row] is None, f"row {init.row} is given away twice"
            self._rows[init.row] = _Row(init, self._max_model_len, self._page_size)
        for update in plan.table_updates:
            size = self._page_size
            first, end = update.first_page * size, (update.first_page + len(update.refs)) * size
            state = self._row(update.row)
            assert update.refs.min(initial=0) >= 0, f"{update} names no page"
            assert update.component in (0, 1), f"there is no component {update.component}"
            table, num_pages = state.cells, self._num_pages
            if update.component:
                assert self._window is not None, f"{update} is of a window"
                table, num_pages = state.window_cells, self._window.num_pages
            cells = flat_slots(update.refs, num_pages)[:, None] * size + np.arange(size)
            table[first:end] = cells.ravel()
        self.replicas.begin(plan.replicas)

    def _row(self, row: int) -> _Row:
        state = self._rows[row]
        assert state is not None, f"row {row} is not in use"
        return state

    def _write(self, plan: RowPlan) -> None:
        row = self._row(plan.row)
        assert row.init.serial == plan.serial, f"row {plan.row} has another tenant"
        end = plan.start + plan.count
        assert 0 < plan.count <= row.num_known - plan.start, f"{plan} is past what is known"
        ids = row.tokens[plan.start : end]
        if plan.tokens is None:
            assert (plan.count, end) == (1, row.num_known), f"{plan} is no future"
        else:
            assert np.array_equal(ids, tokens_from_bytes(plan.tokens)), f"{plan}: other ids"
        first = min(max(plan.start, plan.write_from), end)
        if first < end:
            cells = self._cells_of(row, first, end)
            self._flat[cells] = (self._positions[first:end] << _POSITION_SHIFT) | ids[
                first - plan.start :
            ]

    def _attend_window(self, plan: RowPlan, window: WindowMemory) -> None:
        row = self._row(plan.row)
        end = plan.start + plan.count
        fault = self._misplaced(row, plan, window)
        fault = fault or window.compute(row.window_cells, row.tokens[:end], plan)
        if fault is not None and plan.serial not in self._void:
            raise PageFault(f"row {plan.row}, serial {plan.serial}: {fault}")

    def _misplaced(self, row: _Row, plan: RowPlan, window: WindowMemory) -> str | None:
        """What is wrong with where the tokens to compute have their two pages."""
        if self._num_owners == 1:
            return None
        span = slice(plan.start, plan.start + plan.count)
        owners = row.cells[span] // (self._num_pages * self._page_size)
        beside = row.window_cells[span] // (window.num_pages * self._page_size)
        if (owners == beside).all():
            return None
        first = plan.start + int(np.argmax(owners != beside))
        return f"position {first} has its window page on another rank than its full page"

    def _attend(self, plan: RowPlan) -> RowResult | None:
        row = self._row(plan.row)
        end = plan.start + plan.count
        read = self._flat[self._cells_of(row, 0, end)]
        wrong = (read >> _POSITION_SHIFT) != self._positions[:end]
        if wrong.any():
            where = int(np.argmax(wrong))
            if plan.serial not in self._void:
                raise PageFault(f"row {plan.row}: position {where} of {end} is not in its page")
        context = read.astype(np.int32)  # the low half
        if self.replicas.any:
            self._check_replicas(row, plan)
        if not plan.sample:
            return None
        assert end == row.num_known, f"{plan}: sampled before the end of what is known"
        error = self._fail_row(plan.serial, plan.output_index)
        if wrong.any():
            error = "it read pages of a failed load"
        token = (
            0
            if error is not None
            else choose(
                self._model,
                tokens_to_bytes(context),
                index=plan.output_index,
                min_tokens=row.init.sampling.min_tokens,
                stop_ids=row.init.stop_ids,
            )
        )
        index = row.num_known - row.init.num_prompt_tokens
        assert plan.output_index == index, f"{plan}: this is output number {index}"
        row.tokens[row.num_known] = token
        row.num_known += 1  # after an error too: a wasted row may read it in the next step
        return RowResult(
            row=plan.row, serial=plan.serial, token=-1 if error else token, error=error
        )

    def _check_replicas(self, row: _Row, plan: RowPlan) -> None:
        """Every rank that computes a part of the row reads what it has of it itself."""
        size = self._page_size
        pages = row.cells[: plan.start + plan.count : size] // size
        ranks = np.unique(pages[plan.start // size :] // self._num_pages)
        fault = self.replicas.fault(ranks.tolist(), pages.tolist())
        if fault is not None and plan.serial not in self._void:
            raise PageFault(f"row {plan.row}, serial {plan.serial}: {fault}")

    def _cells_of(self, row: _Row, start: int, end: int) -> npt.NDArray[np.int64]:
        cells = row.cells[start:end]
        if cells.min() < 0:
            raise PageFault(f"row of serial {row.init.serial} has no page for some position")
        return cells
