"""The worker's tables: page tables, last token and sampling state of every row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phloem.core.plan import PageTableUpdate, RowInit, RowPlan, StepPlan
from phloem.core.refs import flat_slots
from phloem.core.request import SamplingParams
from phloem.core.tokens import tokens_from_bytes
from phloem.worker.sampled import SampledTokens

__all__ = ["RowState", "RowTables"]


@dataclass(slots=True)
class RowState:
    """A request's sampling state. `counts` is kept only where a penalty needs it."""

    serial: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    prompt_ids: npt.NDArray[np.int64]  # unique
    counts: dict[int, int]  # of output tokens

    @property
    def has_penalties(self) -> bool:
        s = self.sampling
        return bool(s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0)

    def note(self, token: int) -> None:
        """Count a sampled token."""
        if self.has_penalties:
            self.counts[token] = self.counts.get(token, 0) + 1


class RowTables:
    """State of `max_running` rows; a row of a component's page table holds `max_pages` slots.

    Slots count through the pools of all owners, `pages_per_owner[component]` pages each; with one
    owner that figure does not matter. `sampled`: shared with other ranks.
    `copy`: whose pool holds this rank's copies of the pages, where refs name the first one's.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_pages: int,
        num_components: int = 1,
        pages_per_owner: tuple[int, ...] = (),
        sampled: SampledTokens | None = None,
        copy: int = 0,
    ) -> None:
        self._pages = np.zeros((num_components, max_running, max_pages), dtype=np.int64)
        self._pages_per_owner = pages_per_owner or (0,) * num_components
        self._copy = copy
        self._sampled = sampled or SampledTokens(max_running)
        self._last_token = self._sampled.tokens
        self._states: list[RowState | None] = [None] * max_running

    def apply(self, plan: StepPlan) -> None:
        """Take over what the plan says before its forward pass."""
        for row in plan.released:
            self._states[row] = None
        for init in plan.admitted:
            self._states[init.row] = _initial_state(init)
        for update in plan.table_updates:
            self._update_pages(update)

    def serials(self, rows: Iterable[int]) -> list[int]:
        """The serials under which `rows` are held."""
        return [state.serial for row in rows if (state := self._states[row]) is not None]

    def slots(
        self, row: int, end_page: int, *, first_page: int = 0, component: int = 0
    ) -> npt.NDArray[np.int64]:
        """A copy of pages first_page ... end_page - 1 of a row's table."""
        return self._pages[component, row, first_page:end_page].copy()

    def pages_at(self, rows: list[int], pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Page pages[i] of the table of row rows[i], of component 0."""
        return self._pages[0, rows, pages]

    def tokens(self, plan: RowPlan) -> npt.NDArray[np.int64]:
        """The ids that a row computes; a future is its last sampled token."""
        if plan.tokens is None:
            assert plan.count == 1, f"a future stands for one token, not {plan.count}"
            return self._last_token[plan.row : plan.row + 1].copy()
        ids = tokens_from_bytes(plan.tokens).astype(np.int64)
        assert len(ids) == plan.count, f"{len(ids)} tokens for a span of {plan.count}"
        return ids

    def state(self, plan: RowPlan) -> RowState | None:
        """The row's state, or None if another request (or none) has the row by now."""
        state = self._states[plan.row]
        return state if state is not None and state.serial == plan.serial else None

    def put_token(self, plan: RowPlan, token: int) -> None:
        """Remember a sampled token for the futures of later plans."""
        state = self.state(plan)
        if state is not None:
            self._sampled.put(plan, token)
            state.note(token)

    def learn(self, plan: RowPlan) -> None:
        """Count the token that another rank has sampled for `plan`."""
        state = self.state(plan)
        if state is not None and state.has_penalties:
            token = self._sampled.find(plan)
            if token is not None:
                state.note(token)

    def _update_pages(self, update: PageTableUpdate) -> None:
        end = update.first_page + len(update.refs)
        num_components, _, max_pages = self._pages.shape
        assert update.component < num_components, (
            f"component {update.component} of a model with {num_components} (row {update.row})"
        )
        assert end <= max_pages, f"page {end} of a table of {max_pages} pages (row {update.row})"
        table = self._pages[update.component]
        pages = self._pages_per_owner[update.component]
        slots = flat_slots(update.refs, pages) + self._copy * pages
        table[update.row, update.first_page : end] = slots


def _initial_state(init: RowInit) -> RowState:
    state = RowState(
        serial=init.serial,
        sampling=init.sampling,
        seed=init.seed,
        stop_ids=init.stop_ids,
        prompt_ids=np.empty(0, dtype=np.int64),
        counts={},
    )
    if state.has_penalties:
        ids = tokens_from_bytes(init.tokens)
        state.prompt_ids = np.unique(ids[: init.num_prompt_tokens]).astype(np.int64)
        for token in ids[init.num_prompt_tokens :].tolist():
            state.note(token)
    return state
