"""Runs one step plan: tables, forward pass, logits, sampling.

Peak memory of a step: weights, pages, and `memory.activation_bytes`, which is linear in the tokens
of the step. Logits exist only for rows that sample (or, under an audit, a slice at a time).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phloem.attention import LayeredAttention
from phloem.core.plan import RowResult, StepPlan, StepResult
from phloem.core.refs import slots_of
from phloem.core.transfer import LayerGate
from phloem.models import Forward
from phloem.pools import DevicePool
from phloem.worker.inputs import StepInputs, build_inputs
from phloem.worker.layer_waits import LayerWaits
from phloem.worker.memory import logits_rows_per_pass
from phloem.worker.rows import RowTables
from phloem.worker.sampler import Candidate, sample

__all__ = ["CaptureLogits", "Hooks", "Runner"]

# (row's serial, position of the first, logits (count, vocab) fp32): for tests and audits.
CaptureLogits = Callable[[int, int, Tensor], None]


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What a runner tells or does besides its work.

    `on_layer` is called after every layer (the heartbeat); `capture_logits` gets the logits of
    every position; `nan_fill` poisons pages that the plan says were freed.
    """

    on_layer: Callable[[], None] = _nothing
    capture_logits: CaptureLogits | None = None
    nan_fill: bool = False


class Runner:
    """Executes plans one at a time, on the calling thread."""

    def __init__(
        self,
        model: Forward,
        pools: Sequence[DevicePool],
        *,
        attention: LayeredAttention,
        tables: RowTables,
        hooks: Hooks,
        gate: LayerGate | None = None,
    ) -> None:
        self._model, self._pools, self._attention = model, tuple(pools), attention
        self._page_size = self._pools[0].layout.spec.page_size
        self._tables, self._hooks, self._gate = tables, hooks, gate
        self._cancelled: set[int] = set()  # serials; written by another thread
        self._stopped = False

    def replace(self, model: Forward, attention: LayeredAttention) -> None:
        """Other weights from now on; only while no plan is in flight."""
        self._model, self._attention = model, attention

    def cancel(self, serial: int) -> None:
        """See `Worker.cancel`. From any thread."""
        self._cancelled.add(serial)

    def stop(self) -> None:
        """Give up the running step at its next layer, and all later ones. From any thread."""
        self._stopped = True

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Execute `plan` and return the sampled tokens. Plans must come in submission order."""
        started = time.perf_counter()
        if self._hooks.nan_fill:
            freed = (plan.freed_pages, plan.freed_window_pages)
            for pool, refs in zip(self._pools, freed, strict=False):
                pool.fill_nan(slots_of(refs))
        self._cancelled.difference_update(self._tables.serials(plan.released))
        self._tables.apply(plan)
        on_layer = functools.partial(self._between_layers, plan)
        layers = LayerWaits(self._gate, plan.loads, on_layer)
        try:
            results = self._forward(plan, layers) if plan.rows else []
        except _NobodyWaits:
            results = [
                RowResult(row=row.row, serial=row.serial, error="the request was aborted")
                for row in plan.rows
                if row.sample
            ]
        if self._gate is not None:
            self._gate.step_finished(plan.step)
        return StepResult(
            step=plan.step,
            rows=tuple(results),
            compute_s=time.perf_counter() - started,
            load_wait_s=layers.waited_s,
        )

    def _forward(self, plan: StepPlan, layers: LayerWaits) -> list[RowResult]:
        inputs = build_inputs(
            plan,
            self._tables,
            page_size=self._page_size,
            window=self._model.config.window,
            device=self._model.device,
        )
        meta = self._attention.plan(inputs.batches)
        layers.wait()
        hidden = self._model.forward(
            inputs.tokens,
            inputs.positions,
            attention=self._attention,
            meta=meta,
            on_layer=layers.layer_done,
        )
        if self._hooks.capture_logits is not None:
            self._capture(plan, inputs, hidden, self._hooks.capture_logits)
        return self._sample(inputs, hidden)

    def _between_layers(self, plan: StepPlan) -> None:
        self._hooks.on_layer()
        cancelled = self._cancelled
        if self._stopped or (cancelled and all(row.serial in cancelled for row in plan.rows)):
            raise _NobodyWaits

    def _sample(self, inputs: StepInputs, hidden: Tensor) -> list[RowResult]:
        step = logits_rows_per_pass(self._model.config.vocab_size)
        results: list[RowResult] = []
        for low in range(0, len(inputs.sampled), step):
            plans = inputs.sampled[low : low + step]
            last = hidden.index_select(0, inputs.last_index[low : low + step])
            logits = self._model.logits(last)
            states = [self._tables.state(plan) for plan in plans]
            live = [i for i, state in enumerate(states) if state is not None]
            candidates = [Candidate(plans[i], s) for i, s in enumerate(states) if s is not None]
            chosen = sample(logits if len(live) == len(plans) else logits[live], candidates)
            by_row = {i: result for i, result in zip(live, chosen, strict=True)}
            for i, plan in enumerate(plans):
                result = by_row.get(i) or _stale(plan.row, plan.serial)
                if result.error is None:
                    self._tables.put_token(plan, result.token)
                results.append(result)
        return results

    def _capture(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, capture: CaptureLogits
    ) -> None:
        step = logits_rows_per_pass(self._model.config.vocab_size)
        for row, span in zip(plan.rows, inputs.batches[0].spans, strict=True):
            for low in range(0, span.count, step):
                high = min(low + step, span.count)
                logits = self._model.logits(hidden[span.first + low : span.first + high])
                capture(row.serial, span.start + low, logits)


class _NobodyWaits(Exception):
    """All requests of the step have ended: what is left of it need not be computed."""


def _stale(row: int, serial: int) -> RowResult:
    """A row whose request has gone: nobody reads the result."""
    return RowResult(row=row, serial=serial, error="the request has left its row")
