"""Several ranks in one process: a thread each, over the pages of all of them in one tensor.

As ranks of one machine will do it: each computes the tokens whose pages it owns, writes a layer's K
and V, meets the others, and attends over everybody's pages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phloem.attention.remote import RemoteAttention
from phloem.attention.remote_pages import RankPool
from phloem.config.checkpoint import read_model_config
from phloem.core.plan import PageTableUpdate, RowPlan, StepPlan
from phloem.core.remote import IN_PLACE, RemoteWays
from phloem.core.tokens import tokens_to_bytes
from phloem.groups.base import BaseGroup
from phloem.groups.local import local_groups
from phloem.kv.spec import KVDtype
from phloem.models import Quantisation
from phloem.worker.forward import ForwardOptions, ForwardPass, load_forward
from phloem.worker.inputs import RankShare, StepInputs, build_inputs
from phloem.worker.pages import kv_specs, make_pools
from phloem.worker.rows import RowTables

FULL, WINDOW = 0, 1
CPU = torch.device("cpu")
NUM_POSITIONS = 512
MEETING_S = 60.0


@dataclass
class Row:
    """A request: its ids, the owner of each page, and where a restart writes and reads from."""

    ids: list[int]
    owners: np.ndarray
    write_from: int = 0
    window_from: int = 0
    pages: list[np.ndarray] = field(default_factory=list)  # by component, global numbers


Meeting = Callable[[int, int], None]  # (rank, layer)


class Ranks:
    """`num_ranks` ranks that run the same hand-written plans over shared pools.

    Every page is NaN before its first use. `logits[row][position]` and `calls[rank]` (the layers of
    which the rank was told that they are written) are what tests look at.
    """

    def __init__(
        self,
        path: object,
        num_ranks: int,
        *,
        page_size: int,
        kernels: str,
        pages_per_rank: int = 160,
        dtype: KVDtype = KVDtype.FP32,
        remote: RemoteWays = IN_PLACE,
        twin: Callable[[BaseGroup], BaseGroup] | None = None,
    ) -> None:
        self.config = read_model_config(Path(str(path)))
        self.num_ranks, self.page_size, self.pages_per_rank = num_ranks, page_size, pages_per_rank
        specs = kv_specs(self.config, dtype=dtype, page_size=page_size)
        torch_dtype = torch.bfloat16 if dtype is KVDtype.BF16 else torch.float32
        self.remote = remote
        direct = not remote.exchanges
        counts = [(num_ranks if direct else 1) * pages_per_rank] * len(specs)
        # By rank, if each has its own, and by component.
        self.pools = [
            make_pools(specs, counts, CPU, dtype=torch_dtype)
            for _ in range(1 if direct else num_ranks)
        ]
        for pool in (pool for pools in self.pools for pool in pools):
            pool.fill_nan(np.arange(pool.num_pages))
        options = ForwardOptions(
            kernels=kernels,
            quantisation=Quantisation.NONE,
            dtype=torch_dtype,
            device=CPU,
            threads=1,
            num_positions=NUM_POSITIONS,
        )
        self.passes = [
            load_forward(Path(str(path)), self.config, self.pools[0 if direct else r], options)
            for r in range(num_ranks)
        ]
        groups: list[BaseGroup] = [*local_groups(num_ranks, timeout_s=MEETING_S)]
        self.groups = groups if twin is None else [twin(group) for group in groups]
        self.attentions = [
            forward.attention if direct else self._exchanging(rank, forward)
            for rank, forward in enumerate(self.passes)
        ]
        self.tables = RowTables(
            max_running=8, max_pages=NUM_POSITIONS // page_size + 1, num_components=len(specs)
        )
        rng = np.random.default_rng(7)
        self._free = [
            [rng.permutation(pages_per_rank).tolist() for _ in range(num_ranks)] for _ in specs
        ]
        # One window page of each rank is nobody's: what must not be read points at it.
        self._absent = [free.pop() for free in self._free[-1]]
        self.rows: dict[int, Row] = {}
        self.logits: dict[int, dict[int, torch.Tensor]] = {}
        self.calls: list[list[int]] = [[] for _ in range(num_ranks)]
        self.last: list[StepInputs] = []  # of each rank, of the last step
        self.alter: Callable[[int, StepInputs], StepInputs] = lambda _, inputs: inputs
        self.share_of: Callable[[int], RankShare | None] = self._share
        self._step = 0

    def admit(self, number: int, row: Row) -> None:
        """Give a row its pages, those that it has not got yet, on their owners."""
        for component in range(len(row.pages), len(self.pools[0])):
            free = self._free[component]
            slots = [o * self.pages_per_rank + free[o].pop() for o in row.owners.tolist()]
            row.pages.append(np.array(slots, dtype=np.int64))
        self.rows[number], self.logits[number] = row, {}
        self._write_table(number)

    def restart(self, number: int, ids: list[int], *, kept: int, start: int, source: int) -> None:
        """A row whose pages [0, kept) another one holds, but for their window state: it begins at
        page `start`."""
        owners = self.rows[source].owners
        row = Row(ids, owners, kept * self.page_size, start * self.page_size)
        own = [o * self.pages_per_rank + self._free[FULL][o].pop() for o in owners[kept:].tolist()]
        row.pages.append(np.concatenate([self.rows[source].pages[FULL][:kept], own]))
        window = [o * self.pages_per_rank + self._absent[o] for o in owners[:start].tolist()]
        for o in owners[start:].tolist():
            window.append(o * self.pages_per_rank + self._free[WINDOW][o].pop())
        row.pages.append(np.array(window, dtype=np.int64))
        self.admit(number, row)

    def slide(self, number: int, end: int, window: int) -> None:
        """Poison the window pages that no token from `end` on reads."""
        gone = max(0, end - window + 1) // self.page_size
        row = self.rows[number]
        for page in row.pages[WINDOW][:gone].tolist():
            rank, slot = self._where(page)
            self.pools[rank][WINDOW].fill_nan(np.array([slot]))
        row.pages[WINDOW][:gone] = [
            o * self.pages_per_rank + self._absent[o] for o in row.owners[:gone].tolist()
        ]
        self._write_table(number)

    def chunk(self, number: int, start: int, end: int) -> RowPlan:
        """Compute ids[start:end] of a row, and want a token after them."""
        row = self.rows[number]
        return RowPlan(
            row=number,
            serial=number,
            start=start,
            count=end - start,
            tokens=tokens_to_bytes(row.ids[start:end]),
            sample=True,
            write_from=row.write_from,
            window_from=row.window_from,
        )

    def step(self, *rows: RowPlan, meeting: Meeting | None = None) -> None:
        """Run one step on all ranks, each in a thread, and keep the logits of all positions."""
        plan = StepPlan(step=self._step, rows=rows)
        self._step += 1
        barrier = threading.Barrier(self.num_ranks)

        def meet(rank: int, layer: int) -> None:
            self.calls[rank].append(layer)
            barrier.wait(MEETING_S)

        met = meet if meeting is None else meeting
        with ThreadPoolExecutor(self.num_ranks) as threads:
            parts = list(threads.map(lambda r: self._run(r, plan, met), range(self.num_ranks)))
        self.last = [inputs for inputs, _ in parts]
        self._keep(parts)

    def step_one_by_one(self, *rows: RowPlan) -> None:
        """One rank after the other, without any meeting."""
        plan = StepPlan(step=self._step, rows=rows)
        self._keep([self._run(rank, plan, lambda *_: None) for rank in range(self.num_ranks)])

    def row_logits(self, number: int) -> torch.Tensor:
        """The logits of a row, in the order of their positions, each computed by one rank."""
        by_position = self.logits[number]
        return torch.stack([by_position[pos] for pos in sorted(by_position)])

    def page(self, number: int, index: int, component: int) -> torch.Tensor:
        """The elements of a row's page."""
        rank, slot = self._where(int(self.rows[number].pages[component][index]))
        return self.pools[rank][component].buffer.data[slot]

    def _where(self, page: int) -> tuple[int, int]:
        """The pools, and the slot there, of a page of this global number."""
        return divmod(page, self.pages_per_rank) if self.remote.exchanges else (0, page)

    def _exchanging(self, rank: int, forward: ForwardPass) -> RemoteAttention:
        pools = [RankPool(p.buffer, rank, self.pages_per_rank) for p in self.pools[rank]]
        return RemoteAttention(forward.attention, pools, self.groups[rank])

    def _share(self, rank: int) -> RankShare | None:
        return RankShare(rank, self.pages_per_rank) if self.num_ranks > 1 else None

    def _write_table(self, number: int) -> None:
        updates = [
            PageTableUpdate(row=number, first_page=0, refs=refs, component=component)
            for component, refs in enumerate(self.rows[number].pages)
        ]
        self.tables.apply(StepPlan(step=-1, rows=(), table_updates=tuple(updates)))

    @torch.inference_mode()
    def _run(self, rank: int, plan: StepPlan, meeting: Meeting) -> tuple[StepInputs, torch.Tensor]:
        built = self._inputs(plan, self.share_of(rank))
        inputs, forward = self.alter(rank, built), self.passes[rank]
        attention = self.attentions[rank]
        hooks: dict[str, Any] = {"on_layer": lambda: None}
        if self.num_ranks > 1 and not self.remote.exchanges:
            hooks["on_written"] = lambda layer: meeting(rank, layer)
        hidden = forward.model.forward(
            inputs.tokens,
            inputs.positions,
            attention=attention,
            meta=self._meta(rank, plan, inputs),
            **hooks,
        )
        return inputs, forward.model.logits(hidden)

    def _meta(self, rank: int, plan: StepPlan, inputs: StepInputs) -> Any:
        attention = self.attentions[rank]
        if not isinstance(attention, RemoteAttention):
            return attention.plan(inputs.batches)
        shares = [self._inputs(plan, self.share_of(r)).batches for r in range(self.num_ranks)]
        return attention.plan(self.remote, shares)

    def _inputs(self, plan: StepPlan, share: RankShare | None) -> StepInputs:
        return build_inputs(
            plan,
            self.tables,
            page_size=self.page_size,
            window=self.config.window,
            device=CPU,
            share=share,
        )

    def _keep(self, parts: Sequence[tuple[StepInputs, torch.Tensor]]) -> None:
        for inputs, logits in parts:
            for row, span in zip(inputs.rows, inputs.batches[0].spans, strict=True):
                for i, position in enumerate(span.positions().tolist(), span.first):
                    assert position not in self.logits[row.row], "two ranks computed one token"
                    self.logits[row.row][position] = logits[i]
