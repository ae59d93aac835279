"""Does the suite notice? Each test breaks one thing and expects the checks to go red."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from phloem.cache.node import Node
from phloem.core.plan import StepPlan
from phloem.transfer import TransferEngine, TransferHooks
from phloem.transfer.copier import CpuCopier
from phloem.worker.rows import RowTables
from phloem.worker.runner import Runner
from phloem.worker.verify import FreePages
from tests.cache.test_mutations import never_lock
from tests.parity.rig import Cold, Rig, check_all, read_page
from tests.parity.test_journeys import words

P = 4


def journey(rig: Rig) -> None:
    """Hits, follow-up turns and enough strangers to make every free page change hands."""
    prompt = words(7, 6 * P)
    first = rig.ask(prompt, 2 * P)
    for i in range(4):
        rig.add(prompt + words(8 + i, P), 3 * P)
        rig.add(words(60 + i, 9 * P), P)
    rig.loop.run_until_idle()
    rig.ask(prompt + first.tokens + words(9, P), P)


def run(tiny: Path, cold: Cold, *, sabotage: Callable[[Rig], None] | None = None) -> None:
    with Rig(tiny, page_size=P, num_pages=56, max_prefill_tokens=3 * P, max_running=4) as rig:
        journey(rig)
        if sabotage is not None:
            sabotage(rig)
            rig.ask(words(7, 6 * P) + words(5, 2), P)
        check_all(rig, cold)


def longest(rig: Rig) -> Node:
    """The node with the most pages on the prompt that the last question will hit."""
    tree = rig.cache.state.tree
    nodes = [n for n in tree.nodes.values() if n is not tree.root]
    return max((n for n in nodes if n.parent is tree.root), key=lambda n: n.num_pages)


def test_the_journey_itself_is_green(tiny: Path, cold: Cold) -> None:
    run(tiny, cold)


def zero_a_page(rig: Rig) -> None:
    ref = int(np.frombuffer(longest(rig).refs, dtype=np.int64)[1])
    rig.loaded.pool.write_page(ref, bytes(rig.loaded.page_bytes))


def swap_two_pages(rig: Rig) -> None:
    """No logit changes by this: keys carry their positions. Only the audit can see it."""
    node = longest(rig)
    refs = np.frombuffer(node.refs, dtype=np.int64).copy()
    refs[[0, 1]] = refs[[1, 0]]
    node.refs = refs.tobytes()


def shift_the_pages(rig: Rig) -> None:
    node = longest(rig)
    node.refs = np.roll(np.frombuffer(node.refs, dtype=np.int64), 1).tobytes()


def flip_one_number(rig: Rig) -> None:
    ref = int(np.frombuffer(longest(rig).refs, dtype=np.int64)[0])
    page = read_page(rig, ref)
    page[3] += 0.05 * page.abs().max()
    rig.loaded.pool.write_page(ref, page.numpy().tobytes())


@pytest.mark.parametrize(
    "sabotage", [zero_a_page, swap_two_pages, shift_the_pages, flip_one_number]
)
def test_a_damaged_page_is_noticed(tiny: Path, cold: Cold, sabotage: Callable[[Rig], None]) -> None:
    with pytest.raises(AssertionError):
        run(tiny, cold, sabotage=sabotage)


def lose_a_table_update(patch: pytest.MonkeyPatch) -> None:
    """The third change of a page table never reaches the worker."""
    original, seen = RowTables.apply, [0]

    def apply(self: RowTables, plan: StepPlan) -> None:
        kept = []
        for update in plan.table_updates:
            seen[0] += 1
            if seen[0] != 3:
                kept.append(update)
        original(self, structs.replace(plan, table_updates=tuple(kept)))

    patch.setattr(RowTables, "apply", apply)


def shift_positions(patch: pytest.MonkeyPatch) -> None:
    """A chunk that starts on cached pages believes to be one token later."""
    original = Runner.run

    def run_shifted(self: Runner, plan: StepPlan, free: FreePages | None) -> object:
        rows = tuple(
            structs.replace(r, start=r.start - 1) if r.count > 1 and r.start else r
            for r in plan.rows
        )
        return original(self, structs.replace(plan, rows=rows), free)

    patch.setattr(Runner, "run", run_shifted)


def read_a_future_too_early(patch: pytest.MonkeyPatch) -> None:
    """The token buffer still holds the token before: a wait that was skipped."""
    original = RowTables.put_token
    late: dict[int, tuple[object, int]] = {}

    def put_token(self: RowTables, row: object, token: int) -> None:
        held = late.get(row.row)  # type: ignore[attr-defined]
        late[row.row] = (row, token)  # type: ignore[attr-defined]
        original(self, row, token if held is None else held[1])

    patch.setattr(RowTables, "put_token", put_token)


@pytest.mark.parametrize(
    "mutate", [never_lock, lose_a_table_update, shift_positions, read_a_future_too_early]
)
def test_a_broken_rule_is_noticed(
    tiny: Path,
    cold: Cold,
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
) -> None:
    cold.answer(words(1, 3), 1)  # the oracle is loaded before anything breaks
    rig = Rig(tiny, page_size=P, num_pages=56, max_prefill_tokens=3 * P, max_running=4)
    with monkeypatch.context() as patch:
        mutate(patch)
        try:
            journey(rig)
            stopped = rig.loop.dead
        except AssertionError as error:  # one of the engine's own: that is noticing, too
            stopped = str(error)
    if stopped is None:
        with pytest.raises(AssertionError):
            check_all(rig, cold)
    rig.recorder.close()


def skip_a_layers_wait(patch: pytest.MonkeyPatch) -> None:
    """The worker does not wait for the layers of a load."""
    patch.setattr(TransferEngine, "wait_layer", lambda self, ids, layer: None)


def copy_the_wrong_layer(patch: pytest.MonkeyPatch) -> None:
    """The last layer of a load is not moved."""
    original = CpuCopier.to_device

    def to_device(self, device, host, first, end) -> None:
        last = min(end, self._num_layers - 1)
        if first < last:
            original(self, device, host, first, last)

    patch.setattr(CpuCopier, "to_device", to_device)


def backup_of_another_page(patch: pytest.MonkeyPatch) -> None:
    original = CpuCopier.to_host

    def to_host(self, device, host) -> None:
        original(self, np.roll(device, 1), host)

    patch.setattr(CpuCopier, "to_host", to_host)


def chat(rig: Rig) -> None:
    """Turns that come back after their pages have left the device."""
    history = words(31, 10 * P)
    for turn in range(4):
        answer = rig.ask(history, P)
        history = history + answer.tokens + words(32 + turn, P)
        rig.ask(words(200 + turn, 20 * P), P)


@pytest.mark.parametrize(
    "mutate", [skip_a_layers_wait, copy_the_wrong_layer, backup_of_another_page]
)
def test_a_broken_rule_of_the_tiers_is_noticed(
    tiny: Path,
    cold: Cold,
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
) -> None:
    cold.answer(words(1, 3), 1)
    hold = threading.Event()  # every layer of a load comes late, as it does on a slow machine
    hooks = TransferHooks(before_chunk=lambda *_: hold.wait(0.003), whole_layers=True)
    rig = Rig(tiny, page_size=P, num_pages=28, host_pages=200, transfer_hooks=hooks)
    with monkeypatch.context() as patch:
        mutate(patch)
        try:
            chat(rig)
            stopped = rig.loop.dead
        except AssertionError as error:
            stopped = str(error)
    assert rig.scheduler.tiers.cost.chosen["load"] > 0
    if stopped is None:
        with pytest.raises(AssertionError):
            check_all(rig, cold)
    rig.recorder.close()
    rig.loaded.transfers.close()
