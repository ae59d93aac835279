"""Attention over pages that other ranks own, without reading their memory.

GATHER_KV: the pages travel. A rank attends over its own pages, and over copies of the others'.
SEND_Q: the queries travel. Each rank attends over its own pages for all who ask, and the partial
results travel back.

What is computed in parts is merged exactly by log-sum-exp. Layers with a window gather in both
ways: a window is a few pages, staged side by side with the own ones, and attended to at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.attention.backend import AttentionBackend
from phloem.attention.batch import RaggedBatch
from phloem.attention.held import held_part
from phloem.attention.layered import LayeredAttention
from phloem.attention.own_part import OwnPart
from phloem.attention.remote_pages import HALVES, PageExchange, PagePlan, RankPool
from phloem.attention.remote_queries import QueryExchange, add_part
from phloem.core.group import Group, Pending
from phloem.core.remote import Remote
from phloem.kernels import add_sinks

__all__ = ["RemoteAttention", "RemoteStep"]

_Ints = npt.NDArray[np.int64]


class _Travel(Protocol):
    """How one component's layers attend; `layer` counts within it, `half` says which buffer."""

    def plan(self, shares: Sequence[RaggedBatch]) -> Any:
        """`shares[r]`: what rank r computes, with tables of global page numbers."""
        ...

    def fetch(self, layer: int, half: int, plan: Any) -> Pending | None:
        """Begin what needs nothing of this step."""
        ...

    def begin(self, layer: int, half: int, q: Tensor, plan: Any) -> Pending | None:
        """Begin what needs the layer's K and V in their pages."""
        ...

    def finish(
        self, layer: int, half: int, q: Tensor, plan: Any, flights: Sequence[Pending]
    ) -> tuple[Tensor, Tensor]:
        """Attention and its log-sum-exp, as `AttentionBackend.partial`."""
        ...


@dataclass(slots=True)
class RemoteStep:
    """One step: plans by component, and what has been fetched ahead, by the model's layers."""

    plans: tuple[Any, ...]
    writes: tuple[Any, ...]
    ahead: bool
    fetched: dict[int, Pending | None] = field(default_factory=dict)


class RemoteAttention:
    """As `LayeredAttention`, for a rank of a group; every rank passes every layer of every step.

    `layered` attends over `pools`, this rank's pages by component.
    """

    exchanges = True

    def __init__(
        self,
        layered: LayeredAttention,
        pools: Sequence[RankPool],
        group: Group[Tensor],
        *,
        remote: Remote,
    ) -> None:
        if remote is Remote.DIRECT:
            raise ValueError("pages that are read in place need no exchange")
        self._layered, self._pools = layered, tuple(pools)
        self._travels: list[_Travel] = []
        for backend, pool in zip(layered.backends, pools, strict=True):
            if backend.window is not None:
                self._travels.append(_WindowPages(backend, pool, group))
            elif remote is Remote.GATHER_KV:
                self._travels.append(_Pages(backend, pool, group))
            else:
                self._travels.append(QueryExchange(backend, pool, group))
        self._num_layers = layered.num_layers

    def plan(self, shares: Sequence[Sequence[RaggedBatch]], *, ahead: bool = True) -> RemoteStep:
        """`shares[r]`: what rank r computes, by component, with tables of global page numbers.

        `ahead`: cached pages of a layer may be sent while the one before computes. Not where
        they are still being loaded; all ranks must say the same.
        """
        layers = self._layered.layers
        plans, writes = [], []
        for component, travel in enumerate(self._travels):
            mine = [share[component] for share in shares]
            pool, backend = self._pools[component], self._layered.backends[component]
            plans.append(travel.plan(mine) if layers[component] else None)
            own = _own_tables(mine[pool.rank], pool)
            writes.append(backend.plan_write(own) if layers[component] else None)
        step = RemoteStep(tuple(plans), tuple(writes), ahead)
        if ahead:
            step.fetched[0] = self._fetch(0, step)
        return step

    def writes(self, meta: RemoteStep) -> tuple[Any, ...]:
        """By component, what `write` writes by."""
        return meta.writes

    def write(self, layer: int, k: Tensor, v: Tensor, meta: RemoteStep) -> None:
        component, index = self._layered.place(layer)
        self._layered.backends[component].write(index, k, v, meta.writes[component])

    def attend(
        self, layer: int, q: Tensor, meta: RemoteStep, *, sinks: Tensor | None = None
    ) -> Tensor:
        """This rank's queries q (N, H, D), and what the others want of it; N may be 0."""
        component, index = self._layered.place(layer)
        travel, plan, half = self._travels[component], meta.plans[component], layer % HALVES
        cached = meta.fetched.pop(layer) if meta.ahead else self._fetch(layer, meta)
        fresh = travel.begin(index, half, q, plan)
        if meta.ahead and layer + 1 < self._num_layers:
            meta.fetched[layer + 1] = self._fetch(layer + 1, meta)
        flights = [flight for flight in (cached, fresh) if flight is not None]
        out, lse = travel.finish(index, half, q, plan, flights)
        return (out if sinks is None else add_sinks(out, lse, sinks)).flatten(1)

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: RemoteStep,
        *,
        sinks: Tensor | None = None,
        on_written: Callable[[int], None] | None = None,
    ) -> Tensor:
        """As `LayeredAttention.run`."""
        self.write(layer, k, v, meta)
        if on_written is not None:
            on_written(layer)
        return self.attend(layer, q, meta, sinks=sinks)

    def serve(self, layer: int, q: Tensor, meta: RemoteStep) -> None:
        """Take part in a layer without a token: q (0, H, D)."""
        self.attend(layer, q, meta)

    def _fetch(self, layer: int, step: RemoteStep) -> Pending | None:
        component, index = self._layered.place(layer)
        return self._travels[component].fetch(index, layer % HALVES, step.plans[component])


@dataclass(frozen=True, slots=True)
class _PagesPlan:
    """`own`: over this rank's pages; `remote`: over the staged ones, of `index`."""

    pages: PagePlan
    own: OwnPart
    remote: Any
    index: Tensor


class _Pages:
    """Layers without a window: others' pages are staged."""

    def __init__(
        self, backend: AttentionBackend[Any], pool: RankPool, group: Group[Tensor]
    ) -> None:
        self._backend, self._pool = backend, pool
        self._exchange = PageExchange(pool, group)

    def plan(self, shares: Sequence[RaggedBatch]) -> _PagesPlan:
        pool, mine = self._pool, shares[self._pool.rank]
        wanted = []
        for rank, batch in enumerate(shares):
            read = _pages_read(batch, None)
            wanted.append(read[pool.owners(read) != rank])
        pages = self._exchange.plan(wanted, _pages_written(shares))
        own = held_part(mine, pool.is_own, pool.slots)
        remote = held_part(mine, pages.holds, pages.staged)
        index = torch.from_numpy(remote.index).to(pool.buffer.data.device)
        staged = self._backend.over(self._exchange.staging(0), 0)
        here = OwnPart.of(self._backend, own, mine.num_tokens, index.device)
        return _PagesPlan(pages, here, staged.plan(remote.batch), index)

    def fetch(self, layer: int, half: int, plan: _PagesPlan) -> Pending:
        return self._exchange.begin(layer, half, plan.pages.cached)

    def begin(self, layer: int, half: int, q: Tensor, plan: _PagesPlan) -> Pending:  # noqa: ARG002
        return self._exchange.begin(layer, half, plan.pages.written)

    def finish(
        self, layer: int, half: int, q: Tensor, plan: _PagesPlan, flights: Sequence[Pending]
    ) -> tuple[Tensor, Tensor]:
        out, lse = plan.own.partial(self._backend, layer, q)  # while the others' pages arrive
        for flight in flights:
            flight.finish()
        if len(plan.index):
            staged = self._backend.over(self._exchange.staging(half), layer)
            part = staged.partial(0, q.index_select(0, plan.index), plan.remote)
            add_part(out, lse, plan.index, *part)
        return out, lse


@dataclass(frozen=True, slots=True)
class _WindowPlan:
    pages: PagePlan
    staged: Any


class _WindowPages:
    """Layers with a window: all that it holds is staged, this rank's own pages too."""

    def __init__(
        self, backend: AttentionBackend[Any], pool: RankPool, group: Group[Tensor]
    ) -> None:
        self._backend, self._pool = backend, pool
        self._exchange = PageExchange(pool, group)

    def plan(self, shares: Sequence[RaggedBatch]) -> _WindowPlan:
        window, mine = self._backend.window, shares[self._pool.rank]
        wanted = [_pages_read(batch, window) for batch in shares]
        pages = self._exchange.plan(wanted, _pages_written(shares))
        spans = tuple(replace(span, slots=pages.staged(span.slots)) for span in mine.spans)
        staged = self._backend.over(self._exchange.staging(0), 0)
        return _WindowPlan(pages, staged.plan(RaggedBatch(spans, mine.page_size)))

    def fetch(self, layer: int, half: int, plan: _WindowPlan) -> Pending:
        return self._exchange.begin(layer, half, plan.pages.cached)

    def begin(self, layer: int, half: int, q: Tensor, plan: _WindowPlan) -> Pending:  # noqa: ARG002
        return self._exchange.begin(layer, half, plan.pages.written)

    def finish(
        self, layer: int, half: int, q: Tensor, plan: _WindowPlan, flights: Sequence[Pending]
    ) -> tuple[Tensor, Tensor]:
        for flight in flights:
            flight.finish()
        return self._backend.over(self._exchange.staging(half), layer).partial(0, q, plan.staged)


def _pages_read(batch: RaggedBatch, window: int | None) -> _Ints:
    """All pages that a batch reads, sorted, each once."""
    size = batch.page_size
    parts = [s.pages(s.earliest(window) // size, (s.end - 1) // size + 1) for s in batch.spans]
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)


def _pages_written(shares: Sequence[RaggedBatch]) -> _Ints:
    """All pages into which some rank writes, sorted, each once."""
    parts = []
    for batch in shares:
        slots, written = batch.token_slots(), batch.written()
        parts.append(slots if written is None else slots[written])
    return np.unique(np.concatenate(parts))


def _own_tables(batch: RaggedBatch, pool: RankPool) -> RaggedBatch:
    """A rank's batch with its own pages where they lie; others' pages anywhere."""
    spans = []
    for span in batch.spans:
        slots = np.where(pool.is_own(span.slots), pool.slots(span.slots), 0)
        spans.append(replace(span, slots=slots))
    return replace(batch, spans=tuple(spans))
