"""The step plan: what one forward pass computes, decided by the control plane alone.

A worker executes plans in the order in which they were submitted, one at a time. So a page freed
in plan k may be given away in plan k+1: step k has finished with it by then.

Rows. A running request owns one *row* of the worker's tables (0 <= row < max_running) from its
`RowInit` to its release; the row holds the request's page tables, sampling state and last sampled
token. A plan may carry a row whose request has ended meanwhile: its result is ignored (`serial`
tells), its writes land in pages that only later plans may reuse.

Order inside one step: `released`, `freed_pages` (tests fill them with NaN), `admitted`,
`table_updates`, `replicas`, then the forward pass over `rows`, then sampling.

Components. Layers that keep all tokens have their state in component 0, layers with a window in
component 1, each with a pool and a page table of its own. A window table has entries only where
the row may read or write; what lies before them is never read, and nobody says that it is gone.

    full    |-- cached --|-- write_from ... written ----->
    window        |-- window_from ... read and written -->
                  |-- start: a restart lower down computes tokens again whose full state is kept
"""

from __future__ import annotations

import msgspec

from phloem.core.refs import NO_REFS, PageRefs
from phloem.core.remote import IN_PLACE, RemoteWays
from phloem.core.request import SamplingParams, TokenLogprob

__all__ = [
    "PageTableUpdate",
    "ReplicaPlan",
    "RowInit",
    "RowPlan",
    "RowResult",
    "StepPlan",
    "StepResult",
]


class RowInit(msgspec.Struct, frozen=True, kw_only=True):
    """A request takes a row. `tokens`: prompt and, after a retraction, what it had generated."""

    row: int
    serial: int  # unique per admission: tells a late result of the row's former tenant
    sampling: SamplingParams
    seed: int  # the request's own, or one drawn by the scheduler
    stop_ids: tuple[int, ...]  # ids that end it (EOS included unless ignore_eos); for min_tokens
    tokens: bytes
    num_prompt_tokens: int


class PageTableUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """From now on pages first_page ... first_page + len(refs) - 1 of the row's table are `refs`."""

    row: int
    first_page: int
    refs: PageRefs  # (n,) int64
    component: int = 0  # 0: full, 1: window


class RowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request to compute: absolute positions start ... start + count - 1.

    `tokens` None means a future: the row's last sampled token, still unknown here (count == 1).
    `sample`: choose the next token from the last position's logits, put it into the row's token
    buffer, and report it. It is output number `output_index` of its request (for seeds and
    min_tokens).
    """

    row: int
    serial: int
    start: int
    count: int
    tokens: bytes | None
    sample: bool
    output_index: int = 0
    write_from: int = 0
    window_from: int = 0


class ReplicaPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of pages of component 0 on ranks that do not own them: each a page (n,), and where its
    copy is (n,), on the rank that reads it in the page's stead.

    From this step on those `gone` are not read any more, then those `ready` are. Those `made` are
    copied in this step, at any time in it, and read in no step before they are `ready`.
    Page tables, and who computes what, name the pages themselves and know of no copy.
    """

    made: PageRefs = msgspec.field(default_factory=lambda: NO_REFS)
    made_at: PageRefs = msgspec.field(default_factory=lambda: NO_REFS)
    ready: PageRefs = msgspec.field(default_factory=lambda: NO_REFS)
    ready_at: PageRefs = msgspec.field(default_factory=lambda: NO_REFS)
    gone: PageRefs = msgspec.field(default_factory=lambda: NO_REFS)
    gone_at: PageRefs = msgspec.field(default_factory=lambda: NO_REFS)


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass over a ragged batch of prefill chunks and decodes.

    `loads`: ids of LOAD_BACK transfers (submitted before this plan) whose pages its rows read. The
    worker waits for layer n of all of them before it computes layer n. If one of them ends without
    all its pages, the step goes on over whatever is there; the load's result can be polled before
    the step's can be collected, so the scheduler knows which rows to throw away.
    `freed_pages` never names a destination of a load: the poison would race with it.
    """

    step: int
    rows: tuple[RowPlan, ...]
    admitted: tuple[RowInit, ...] = ()
    table_updates: tuple[PageTableUpdate, ...] = ()
    released: tuple[int, ...] = ()
    freed_pages: PageRefs = msgspec.field(default_factory=lambda: NO_REFS)  # of component 0
    freed_window_pages: PageRefs = msgspec.field(default_factory=lambda: NO_REFS)  # of component 1
    loads: tuple[int, ...] = ()
    remote: RemoteWays = IN_PLACE  # how ranks attend over each other's pages; all do the same
    replicas: ReplicaPlan | None = None  # None: nothing changes

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one sampled row.

    `error`: only this row failed (e.g. NaN logits). Its token buffer gets some valid id all the
    same: the next plan may be in flight already and read it, in a row whose result is ignored.
    """

    row: int
    serial: int
    token: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker reports of a finished step; one RowResult for each row with `sample`."""

    step: int
    rows: tuple[RowResult, ...]
    compute_s: float = 0.0
    load_wait_s: float = 0.0  # the part of compute_s in which a layer's pages were waited for
