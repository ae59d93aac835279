"""Attention over pages that other ranks own, where at least a part of it needs an exchange.

GATHER_KV: the pages travel. A rank attends over its own pages, and over copies of the others'.
SEND_Q: the queries travel. Each rank attends over its own pages for all who ask, and the partial
results travel back.

What was cached may go one way and the chunk's own KV another, or be read in place where it is
mapped. All of it is computed in parts, which are merged exactly by log-sum-exp. Layers with a
window gather in any way: a window is a few pages, staged side by side with the own ones, and
attended to at once.
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
from phloem.attention.remote_queries import QueryExchange, QueryPlan, add_part
from phloem.core.group import Group, Pending
from phloem.core.remote import Remote, RemoteWays
from phloem.kernels import add_sinks

__all__ = ["RemoteAttention", "RemoteStep"]

_Ints = npt.NDArray[np.int64]


class _Travel(Protocol):
    """How one component's layers attend; `layer` counts within it, `half` says which buffer."""

    def plan(self, shares: Sequence[RaggedBatch], ways: RemoteWays) -> Any:
        """`shares[r]`: what rank r computes, with tables of global page numbers."""
        ...

    def fetch(self, layer: int, half: int, plan: Any) -> Pending | None:
        """Begin what needs nothing of this step."""
        ...

    def begin(self, layer: int, half: int, q: Tensor, plan: Any) -> Any:
        """Begin what needs the layer's K and V in their pages."""
        ...

    def finish(
        self, layer: int, half: int, q: Tensor, plan: Any, begun: tuple[Pending | None, Any]
    ) -> tuple[Tensor, Tensor]:
        """Attention and its log-sum-exp, as `AttentionBackend.partial`. `begun`: what `fetch` and
        `begin` returned."""
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
        self, layered: LayeredAttention, pools: Sequence[RankPool], group: Group[Tensor]
    ) -> None:
        self._layered, self._pools = layered, tuple(pools)
        self._travels: list[_Travel] = [
            _Parts(backend, pool, group)
            if backend.window is None
            else _WindowPages(backend, pool, group)
            for backend, pool in zip(layered.backends, pools, strict=True)
        ]
        self._num_layers = layered.num_layers

    def plan(
        self, ways: RemoteWays, shares: Sequence[Sequence[RaggedBatch]], *, ahead: bool = True
    ) -> RemoteStep:
        """`shares[r]`: what rank r computes, by component, with tables of global page numbers.

        `ahead`: cached pages of a layer may be sent while the one before computes. Not where
        they are still being loaded; all ranks must say the same, and the same `ways`.
        """
        if not ways.exchanges:
            raise ValueError("pages that are read in place need no exchange")
        layers = self._layered.layers
        plans, writes = [], []
        for component, travel in enumerate(self._travels):
            mine = [share[component] for share in shares]
            pool, backend = self._pools[component], self._layered.backends[component]
            plans.append(travel.plan(mine, ways) if layers[component] else None)
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
        out, lse = travel.finish(index, half, q, plan, (cached, fresh))
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
class _PageWays:
    """Which way each remote page goes. `written`: pages of the chunk's own KV, sorted."""

    ways: RemoteWays
    written: _Ints

    def go(self, pages: _Ints, way: Remote) -> npt.NDArray[np.bool_]:
        if not self.ways.takes(way):
            return np.zeros(len(pages), dtype=np.bool_)
        if self.ways.cached is self.ways.own:
            return np.ones(len(pages), dtype=np.bool_)
        return np.isin(pages, self.written, invert=self.ways.own is not way)


@dataclass(frozen=True, slots=True)
class _PartsPlan:
    """`own`: over what can be read here at once; `remote`: over the staged pages, of `index`.
    `ways`: what is left out of the others."""

    ways: RemoteWays
    own: OwnPart
    pages: PagePlan
    remote: Any
    index: Tensor
    queries: QueryPlan | None


class _Parts:
    """Layers without a window: each part of what others own in the way of its own.

    read here    own pages, and mapped ones that are read in place
    staged       copies of pages that travel
    asked        pages that are attended to by their owners
    """

    def __init__(
        self, backend: AttentionBackend[Any], pool: RankPool, group: Group[Tensor]
    ) -> None:
        self._backend, self._pool = backend, pool
        self._exchange = PageExchange(pool, group)
        self._queries = QueryExchange(backend, pool, group)

    def plan(self, shares: Sequence[RaggedBatch], ways: RemoteWays) -> _PartsPlan:
        pool, mine = self._pool, shares[self._pool.rank]
        if ways.takes(Remote.DIRECT) and not pool.mapped:
            raise ValueError("pages that are not mapped cannot be read in place")
        written = _pages_written(shares)
        by_page = _PageWays(ways, written)
        wanted = []
        for rank, batch in enumerate(shares):
            read = _pages_read(batch, None)
            travels = (pool.owners(read) != rank) & by_page.go(read, Remote.GATHER_KV)
            wanted.append(read[travels])
        pages = self._exchange.plan(wanted, written)
        own = held_part(mine, lambda p: pool.is_own(p) | by_page.go(p, Remote.DIRECT), pool.slots)
        remote = held_part(mine, pages.holds, pages.staged)
        queries = None
        if ways.takes(Remote.SEND_Q):
            queries = self._queries.plan(shares, lambda p: by_page.go(p, Remote.SEND_Q))
        staged = self._backend.over(self._exchange.staging(0), 0)
        index = torch.from_numpy(remote.index).to(pool.buffer.data.device)
        return _PartsPlan(
            ways=ways,
            own=OwnPart.of(self._backend, own, mine.num_tokens, index.device),
            pages=pages,
            remote=staged.plan(remote.batch),
            index=index,
            queries=queries,
        )

    def fetch(self, layer: int, half: int, plan: _PartsPlan) -> Pending | None:
        if plan.ways.cached is not Remote.GATHER_KV:
            return None
        return self._exchange.begin(layer, half, plan.pages.cached)

    def begin(
        self, layer: int, half: int, q: Tensor, plan: _PartsPlan
    ) -> tuple[Pending | None, Any]:
        """The chunk's own pages, and queries: these first, since somebody computes with them."""
        asked = None if plan.queries is None else self._queries.begin(layer, q, plan.queries)
        if plan.ways.own is not Remote.GATHER_KV:
            return None, asked
        return self._exchange.begin(layer, half, plan.pages.written), asked

    def finish(
        self, layer: int, half: int, q: Tensor, plan: _PartsPlan, begun: tuple[Pending | None, Any]
    ) -> tuple[Tensor, Tensor]:
        cached, (written, asked) = begun
        out, lse = plan.own.partial(self._backend, layer, q)  # while the others' parts arrive
        answers = None
        if plan.queries is not None:
            answers = self._queries.answer(layer, plan.queries, asked, q.dtype)
        for flight in (cached, written):
            if flight is not None:
                flight.finish()
        if len(plan.index):
            staged = self._backend.over(self._exchange.staging(half), layer)
            part = staged.partial(0, q.index_select(0, plan.index), plan.remote)
            add_part(out, lse, plan.index, *part)
        if answers is not None:
            self._queries.merge_into(out, lse, layer, answers)
        return out, lse


@dataclass(frozen=True, slots=True)
class _WindowPlan:
    pages: PagePlan
    staged: Any


class _WindowPages:
    """Layers with a window: all that it holds is staged, this rank's own pages too, in any way."""

    def __init__(
        self, backend: AttentionBackend[Any], pool: RankPool, group: Group[Tensor]
    ) -> None:
        self._backend, self._pool = backend, pool
        self._exchange = PageExchange(pool, group)

    def plan(self, shares: Sequence[RaggedBatch], ways: RemoteWays) -> _WindowPlan:  # noqa: ARG002
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
        self, layer: int, half: int, q: Tensor, plan: _WindowPlan, begun: tuple[Pending | None, Any]
    ) -> tuple[Tensor, Tensor]:
        for flight in begun:
            assert flight is not None, "both are sent in every layer"
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
