"""Runs one step plan: tables, forward pass, logits, sampling.

Peak memory of a step: weights, pages, and `memory.activation_bytes`, which is linear in the tokens
of the step. Logits exist only for rows that sample (or, under an audit, a slice at a time).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phloem.attention import LayeredAttention, RaggedBatch
from phloem.attention.choice import AttentionChoice, PlannedAttention
from phloem.core.group import Group
from phloem.core.plan import RowPlan, RowResult, StepPlan, StepResult
from phloem.core.refs import owners_of
from phloem.core.remote import IN_PLACE, LinkRates, Remote, RemoteWays
from phloem.core.transfer import LayerGate
from phloem.models import Forward
from phloem.pools import DevicePool
from phloem.worker.group_peers import GroupPeers
from phloem.worker.inputs import RankShare, StepInputs, build_batches, build_inputs
from phloem.worker.layer_waits import LayerWaits
from phloem.worker.measure import measure_rates
from phloem.worker.memory import logits_rows_per_pass
from phloem.worker.nearest import NearestPages
from phloem.worker.peers import Peers, RankPlace
from phloem.worker.replicas import Replicas
from phloem.worker.rows import RowTables
from phloem.worker.sampler import Candidate, sample
from phloem.worker.verify import FreePages, verify_free_pages

__all__ = ["CaptureLogits", "Hooks", "Runner"]

# (row's serial, position of the first, logits (count, vocab) fp32): for tests and audits.
CaptureLogits = Callable[[int, int, Tensor], None]


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What a runner tells or does besides its work.

    `on_layer` is called after every layer, or once in a pass so short that its layers are one call
    (the heartbeat); `capture_logits` gets the logits of
    every position; `nan_fill` poisons pages that the plan says were freed.
    """

    on_layer: Callable[[], None] = _nothing
    capture_logits: CaptureLogits | None = None
    nan_fill: bool = False


class Runner:
    """Executes plans one at a time, on the calling thread.

    With a `place` it is one rank of several that execute the same plans: it computes the tokens of
    the pages that it owns, alone or with the ranks of its row, and reads the pages of all. It
    leaves the place at its end. `reach`: copies of all pages, so that none has an owner; or how
    those of other ranks are read, if not in place.
    """

    def __init__(
        self,
        model: Forward,
        pools: Sequence[DevicePool],
        *,
        attention: LayeredAttention,
        tables: RowTables,
        hooks: Hooks,
        gate: LayerGate | None = None,
        place: RankPlace | None = None,
        reach: Replicas | AttentionChoice | None = None,
    ) -> None:
        self._model, self._pools, self._attention = model, tuple(pools), attention
        self._page_size = self._pools[0].layout.spec.page_size
        self._tables, self._hooks, self._gate = tables, hooks, gate
        self._cancelled: set[int] = set()  # serials; written by another thread
        self._stopped = False
        self._place, self._peers = place, None if place is None else place.peers
        self._replicas = reach if isinstance(reach, Replicas) else None
        self._choice = reach if isinstance(reach, AttentionChoice) else None
        # Of the ranks of a row, which have the same logits, the first one samples.
        self._samples = place is None or place.shard.index == 0
        self._alone = place is None or place.shard.count == 1
        if place is not None:
            place.peers.tell(hooks.on_layer)
        self._nearest: NearestPages | None = None
        if place is not None and self._choice is not None:
            pool, group = self._choice.pools[0], self._choice.group
            self._nearest = NearestPages(pool, place.axis.size, group)
        self._last_step = -1
        self._sampled: tuple[RowPlan, ...] = ()  # rows of the last plan that sample,
        self._samplers: list[int] = []  # and the rank that does

    def replace(self, model: Forward, attention: LayeredAttention) -> None:
        """Other weights from now on; only while no plan is in flight."""
        self._model, self._attention = model, attention
        if self._choice is not None:
            self._choice.replace(attention)

    def cancel(self, serial: int) -> None:
        """See `Worker.cancel`. From any thread."""
        self._cancelled.add(serial)

    def stop(self) -> None:
        """Give up the running step at its next layer, and all later ones. From any thread."""
        self._stopped = True
        if self._place is not None:
            self._place.give_up()

    @torch.inference_mode()
    def run(self, plan: StepPlan, free: FreePages | None = None) -> StepResult:
        """Execute `plan` and return the sampled tokens. Plans must come in submission order.

        `free`: compare it with all ranks first; each of them must be given its own.
        """
        if free is not None:
            verify_free_pages(self._group, plan.step, free)
        started = time.perf_counter()
        if self._peers is not None:
            self._meet(self._peers, plan)
        if self._hooks.nan_fill:
            self._poison(plan)
        self._cancelled.difference_update(self._tables.serials(plan.released))
        self._tables.apply(plan)
        replicated = self._replicate(plan)
        on_layer = functools.partial(self._between_layers, plan)
        # Where ranks share memory, the one that moves pages waits for all of them: nobody reads a
        # layer before it has posted it. Where they do not, each has a gate for its own pages.
        waits_elsewhere = self._gate is None and self._peers is not None
        layers = LayerWaits(self._gate, () if waits_elsewhere else plan.loads, on_layer)
        try:
            results = self._forward(plan, layers) if plan.rows else []
            replicated()
        except _NobodyWaits:
            results = [
                RowResult(row=row.row, serial=row.serial, error="the request was aborted")
                for row in plan.rows
                if row.sample
            ]
        if self._peers is not None:
            self._peers.finished(plan.step, self._sampled, self._samplers)
        elif self._gate is not None:
            self._gate.step_finished(plan.step)
        return StepResult(
            step=plan.step,
            rows=tuple(results),
            compute_s=time.perf_counter() - started,
            load_wait_s=layers.waited_s,
        )

    def measure(self) -> LinkRates:
        """What this machine does, with all ranks at once, before the first plan."""
        choice = self._choice
        assert choice is not None, "one rank has nobody to measure with"
        return measure_rates(self._model, choice)

    @property
    def _group(self) -> Group[Tensor]:
        """The ranks that hold the same heads; if all hold others, they are one row."""
        group = None if self._place is None else self._place.group or self._place.row
        assert group is not None, "ranks that compare anything are in a group"
        return group

    def leave(self) -> None:
        """Run no more plans: ranks that wait for this one are told. Idempotent."""
        if self._place is not None:
            self._place.leave()

    def _meet(self, peers: Peers | GroupPeers, plan: StepPlan) -> None:
        """All ranks are done with the step before: learn what the others have sampled in it."""
        peers.begin(plan.step)
        for row, rank in zip(self._sampled, self._samplers, strict=True):
            if rank != peers.rank:
                self._tables.learn(row)
        self._sampled, self._samplers = (), []
        if self._gate is not None and self._last_step >= 0:
            self._gate.step_finished(self._last_step)
        self._last_step = plan.step

    def _poison(self, plan: StepPlan) -> None:
        """Each rank what it holds of its own pages: it is the one that writes it next."""
        freed = (plan.freed_pages, plan.freed_window_pages)
        owner = 0 if self._place is None else self._place.owner
        for pool, refs in zip(self._pools, freed, strict=False):
            if self._replicas is not None:
                pool.fill_nan(pool.indices(refs) + owner * pool.num_pages)
            else:
                pool.fill_nan(pool.indices(refs[owners_of(refs) == owner]))

    def _replicate(self, plan: StepPlan) -> Callable[[], None]:
        """Replicas of pages as the plan has them; call what is returned at the end of the step."""
        if self._nearest is None:
            assert plan.replicas is None, "replicas are for ranks that divide the pages"
            return _nothing
        self._nearest.apply(plan.replicas)
        return self._nearest.begin(plan)

    def _share(self, owner: int | None) -> RankShare | None:
        """What an owner of pages has to compute; None: this rank's."""
        place, pages = self._place, self._pools[0].num_pages
        if place is None:
            return None
        if self._replicas is not None:
            return RankShare(place.owner, pages, place.axis.size)
        owner = place.owner if owner is None else owner
        share = RankShare.of_owner(owner, place.axis, pages)
        if self._nearest is None:
            return share
        return replace(share, reads=functools.partial(self._nearest.read_by, owner))

    def _inputs(self, plan: StepPlan) -> StepInputs:
        """What this rank computes of a plan."""
        return build_inputs(
            plan,
            self._tables,
            page_size=self._page_size,
            window=self._model.config.window,
            device=self._model.device,
            share=self._share(None),
        )

    def _batches_of(self, plan: StepPlan, owner: int) -> tuple[RaggedBatch, ...]:
        """What another owner's ranks compute of it."""
        share = self._share(owner)
        assert share is not None, "there are others"
        return build_batches(
            plan,
            self._tables,
            page_size=self._page_size,
            window=self._model.config.window,
            share=share,
        )

    def _remote(self, plan: StepPlan) -> RemoteWays:
        """How pages of other owners are read; where there are none, it does not matter."""
        one = self._place is None or self._place.axis.size == 1
        return IN_PLACE if one else plan.remote

    def _forward(self, plan: StepPlan, layers: LayerWaits) -> list[RowResult]:
        inputs = self._inputs(plan)
        if self._peers is not None:
            assert self._place is not None, "a peer has a place"
            self._sampled = tuple(row for row in plan.rows if row.sample)
            self._samplers = self._who_samples(self._place, self._sampled)
            if not len(inputs.tokens) and not self._remote(plan).exchanges:
                self._stand_by(self._peers, plan, layers)
                return []
        if self._replicas is not None:
            self._replicas.plan(inputs.batches)
        planned = self._planned(plan, inputs)
        layers.wait()
        hidden = self._model.forward(
            inputs.tokens,
            inputs.positions,
            attention=planned.attention,
            meta=planned.meta,
            on_layer=layers.layer_done,
            on_written=self._on_written(plan),
            at_once=not plan.loads,
        )
        if self._hooks.capture_logits is not None:
            self._capture(inputs, hidden, self._hooks.capture_logits)
        return self._sample(inputs, hidden)

    def _who_samples(self, place: RankPlace, rows: Sequence[RowPlan]) -> list[int]:
        """The rank that samples each of these rows: the first one of those that compute its end."""
        share = self._share(None)
        assert share is not None, "it is one rank of several"
        ends: list[int] = share.ends(rows, self._tables, self._page_size).tolist()
        return [end * place.axis.mesh.tp for end in ends]

    def _planned(self, plan: StepPlan, inputs: StepInputs) -> PlannedAttention:
        """Attention in the ways that the plan says; if anything travels, all ranks plan for all."""
        if not self._remote(plan).exchanges:
            place = self._place
            here = place is None or place.pools is not None or place.axis.size == 1
            assert here, "pages of other owners are not mapped"
            return PlannedAttention(self._attention, self._attention.plan(inputs.batches))
        assert self._choice is not None, "pages cannot travel: this rank is in no group"
        assert self._place is not None, "ranks of a group are peers"
        shares = [
            inputs.batches if owner == self._place.owner else self._batches_of(plan, owner)
            for owner in range(self._place.axis.size)
        ]
        return self._choice.plan(plan.remote, shares, ahead=not plan.loads)

    def _on_written(self, plan: StepPlan) -> Callable[[int], None] | None:
        if self._peers is None or self._place is None:
            return None
        reads_others = self._remote(plan).own is Remote.DIRECT and self._place.axis.size > 1
        if not reads_others and not plan.loads:
            return None  # what is sent has been written: nobody need wait for all
        written = functools.partial(self._peers.written, plan.step)
        return written if self._replicas is None else self._replicas.then(written)

    def _stand_by(self, peers: Peers | GroupPeers, plan: StepPlan, layers: LayerWaits) -> None:
        """A step in which this rank computes nothing: others may wait for what it loads."""
        if self._gate is None or not plan.loads:
            return
        layers.wait()
        for layer in range(self._model.config.num_layers):
            peers.post(plan.step, layer)
            layers.layer_done()

    def _between_layers(self, plan: StepPlan) -> None:
        self._hooks.on_layer()
        if self._stopped or (self._cancelled and self._nobody_waits(plan)):
            raise _NobodyWaits

    def _nobody_waits(self, plan: StepPlan) -> bool:
        # Where anything travels all ranks pass all layers, whoever learns first of an end.
        free = self._alone and not self._remote(plan).exchanges
        return free and all(row.serial in self._cancelled for row in plan.rows)

    def _sample(self, inputs: StepInputs, hidden: Tensor) -> list[RowResult]:
        step = logits_rows_per_pass(self._model.config.vocab_size)
        results: list[RowResult] = []
        for low in range(0, len(inputs.sampled), step):
            plans = inputs.sampled[low : low + step]
            logits = self._model.logits(_rows_of(hidden, inputs.last_index, low, low + step))
            if not self._samples:
                continue
            states = [self._tables.state(plan) for plan in plans]
            live = [i for i, state in enumerate(states) if state is not None]
            candidates = [Candidate(plans[i], s) for i, s in enumerate(states) if s is not None]
            own = logits if len(live) == len(plans) else logits[live]
            chosen = sample(own, candidates, self._model.best)
            by_row = {i: result for i, result in zip(live, chosen, strict=True)}
            for i, plan in enumerate(plans):
                result = by_row.get(i) or _stale(plan.row, plan.serial)
                if result.error is None:
                    self._tables.put_token(plan, result.token)
                results.append(result)
        return results

    def _capture(self, inputs: StepInputs, hidden: Tensor, capture: CaptureLogits) -> None:
        step = logits_rows_per_pass(self._model.config.vocab_size)
        positions = inputs.positions.tolist()
        for row, span in zip(inputs.rows, inputs.batches[0].spans, strict=True):
            low, end = span.first, span.first + span.count
            while low < end:  # a run of positions, since between them may be those of other ranks
                high = low + 1
                while high < min(end, low + step) and positions[high] == positions[high - 1] + 1:
                    high += 1
                logits = self._model.logits(hidden[low:high])
                if self._samples:
                    capture(row.serial, positions[low], logits)
                low = high


def _rows_of(hidden: Tensor, last_index: Tensor, low: int, high: int) -> Tensor:
    """Rows last_index[low:high] of hidden. Where every token samples, those are all of them."""
    if len(last_index) == len(hidden):
        return hidden[low:high]
    return hidden.index_select(0, last_index[low:high])


class _NobodyWaits(Exception):
    """All requests of the step have ended: what is left of it need not be computed."""


def _stale(row: int, serial: int) -> RowResult:
    """A row whose request has gone: nobody reads the result."""
    return RowResult(row=row, serial=serial, error="the request has left its row")
