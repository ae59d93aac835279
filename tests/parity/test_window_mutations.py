"""Does the suite notice what goes wrong with windows? Each test breaks one thing."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from phloem.cache.components import ABSENT
from phloem.cache.node import Node
from phloem.cache.window import WindowConfig
from phloem.cache.window_state import WindowState
from phloem.core.plan import StepPlan
from phloem.transfer import TransferEngine, TransferHooks
from phloem.transfer.copier import CpuCopier
from phloem.worker.rows import RowTables
from phloem.worker.runner import Runner
from phloem.worker.verify import FreePages
from tests.parity.conftest import Windowed
from tests.parity.rig import Cold, Rig, check_all, read_page
from tests.parity.test_journeys import words
from tests.parity.test_windows import drop_windows

P, W = 4, 16
HEAD = words(7, 20 * P)


def open_rig(path: Path, **more: object) -> Rig:
    settings = {"page_size": P, "num_pages": 300, "window_pages": 44, "max_prefill_tokens": 3 * P}
    return Rig(path, **{**settings, "max_running": 4, **more})


def journey(rig: Rig) -> None:
    """Hits, a lost tail that is made again, strangers who make window pages change hands."""
    first = rig.ask(HEAD, 2 * P)
    for i in range(4):
        rig.add(HEAD + words(8 + i, P), 3 * P)
        rig.add(words(60 + i, 9 * P), P)
    rig.loop.run_until_idle()
    drop_windows(rig)
    for i in range(3):
        rig.add(words(70 + i, 9 * P), P)
    rig.add(HEAD + first.tokens + words(9, P), 2 * P)
    rig.loop.run_until_idle()
    rig.ask(HEAD + words(8, P), P)


def noticed(rig: Rig, cold: Cold, stopped: str | None) -> bool:
    """By the engine itself, or by the checks."""
    if stopped is not None:
        return True
    try:
        check_all(rig, cold)
    except AssertionError:
        return True
    return False


def test_the_journey_itself_is_green(windowed: Windowed) -> None:
    path, cold = windowed("gpt_oss", W)
    with open_rig(path) as rig:
        journey(rig)
        assert rig.recorder.first_right  # somebody restarted lower down
        check_all(rig, cold)


def with_tail(rig: Rig) -> tuple[Node, list[int]]:
    """The node with the most window pages alive, and their numbers in it."""
    nodes = [n for n in rig.cache.state.tree.nodes.values() if n.extra]
    best = max(nodes, key=lambda n: len(alive_pages(n)))
    return best, alive_pages(best)


def alive_pages(node: Node) -> list[int]:
    return [i for i, ref in enumerate(node.extra[0].ref_list()) if ref != ABSENT]


def permute(rig: Rig, change: Callable[[list[int]], list[int]]) -> None:
    """Give the window pages of one node to others of its pages."""
    node, pages = with_tail(rig)
    refs = node.extra[0].ref_list()
    moved = change([refs[i] for i in pages])
    for page, ref in zip(pages, moved, strict=True):
        refs[page] = ref
    node.extra[0].refs = array("q", refs).tobytes()


def zero_a_page(rig: Rig) -> None:
    node, pages = with_tail(rig)
    ref = node.extra[0].ref_list()[pages[-1]]
    rig.loaded.pools[1].write_page(ref, bytes(rig.loaded.specs[1].page_bytes))


def swap_two_pages(rig: Rig) -> None:
    permute(rig, lambda refs: [refs[1], refs[0], *refs[2:]])


def shift_the_pages(rig: Rig) -> None:
    permute(rig, lambda refs: [*refs[1:], refs[0]])


def flip_one_number(rig: Rig) -> None:
    node, pages = with_tail(rig)
    ref = node.extra[0].ref_list()[pages[0]]
    page = read_page(rig, ref, 1)
    page[3] += 0.05 * page.abs().max()
    rig.loaded.pools[1].write_page(ref, page.numpy().tobytes())


@pytest.mark.parametrize(
    "sabotage", [zero_a_page, swap_two_pages, shift_the_pages, flip_one_number]
)
def test_a_damaged_window_page_is_noticed(
    windowed: Windowed, sabotage: Callable[[Rig], None]
) -> None:
    path, cold = windowed("gpt_oss", W)
    with open_rig(path) as rig:
        journey(rig)
        sabotage(rig)
        with pytest.raises(AssertionError):
            check_all(rig, cold)


def never_lock_windows(patch: pytest.MonkeyPatch) -> None:
    """A tail that is being read may be evicted."""
    patch.setattr(WindowState, "_lock", lambda self, command: None)
    patch.setattr(WindowState, "_unlock", lambda self, command: [])


def write_what_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A restart overwrites full pages with what it computes from a window that is not there."""
    change_rows(patch, write_from=0)


def read_before_the_restart(patch: pytest.MonkeyPatch) -> None:
    """A restart reads window entries that are stale, or another's."""
    change_rows(patch, window_from=0)


def change_rows(patch: pytest.MonkeyPatch, **fields: int) -> None:
    original = Runner.run

    def run(self: Runner, plan: StepPlan, free: FreePages | None) -> object:
        rows = tuple(structs.replace(row, **fields) for row in plan.rows)
        return original(self, structs.replace(plan, rows=rows), free)

    patch.setattr(Runner, "run", run)


def restart_too_late(patch: pytest.MonkeyPatch) -> None:
    """As if the window were all that a model of several layers reaches back."""
    patch.setattr(
        WindowConfig,
        "deep_start",
        lambda self, pages, size: max(0, (pages - self.tail_pages(size)) * size),
    )


def a_tail_of_a_page_less(patch: pytest.MonkeyPatch) -> None:
    """A length is taken for valid although the oldest page of its tail is gone."""
    original = WindowConfig.tail_pages
    patch.setattr(WindowConfig, "tail_pages", lambda self, size: original(self, size) - 1)


def lose_window_updates(patch: pytest.MonkeyPatch) -> None:
    """Every third change of a window table never reaches the worker."""
    original, seen = RowTables.apply, [0]

    def apply(self: RowTables, plan: StepPlan) -> None:
        kept = []
        for update in plan.table_updates:
            seen[0] += update.component
            if not update.component or seen[0] % 3:
                kept.append(update)
        original(self, structs.replace(plan, table_updates=tuple(kept)))

    patch.setattr(RowTables, "apply", apply)


def see_a_token_more(patch: pytest.MonkeyPatch) -> None:
    """The worker's windows are one token longer than the control plane's."""
    from phloem.attention.gather_plan import Planner

    original = Planner.__init__

    def init(self: Planner, buffer: object, window: int | None) -> None:
        original(self, buffer, None if window is None else window + 1)

    patch.setattr(Planner, "__init__", init)


@pytest.mark.parametrize(
    "mutate",
    [
        never_lock_windows,
        write_what_is_kept,
        read_before_the_restart,
        restart_too_late,
        a_tail_of_a_page_less,
        lose_window_updates,
        see_a_token_more,
    ],
)
def test_a_broken_rule_of_windows_is_noticed(
    windowed: Windowed,
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
) -> None:
    path, cold = windowed("gpt_oss", W)
    cold.answer(words(1, 3), 1)  # the oracle is loaded before anything breaks
    with monkeypatch.context() as patch:
        mutate(patch)
        rig = open_rig(path, kernels="torch")  # whose parts the mutations know
        try:
            journey(rig)
            stopped = rig.loop.dead
        except AssertionError as error:  # one of the engine's own: that is noticing, too
            stopped = str(error)
    assert noticed(rig, cold, stopped)
    rig.recorder.close()


def skip_a_layers_wait(patch: pytest.MonkeyPatch) -> None:
    """The worker does not wait for the layers of a load."""
    patch.setattr(TransferEngine, "wait_layer", lambda self, ids, layer: None)


def leave_out_a_window_layer(patch: pytest.MonkeyPatch) -> None:
    """The last window layer of a load is not moved; all of the full ones are."""
    original = CpuCopier.to_device

    def to_device(self, device, host, first, end) -> None:
        last = min(end, self._num_layers - 1) if self._num_layers == 2 else end
        if first < last:
            original(self, device, host, first, last)

    patch.setattr(CpuCopier, "to_device", to_device)


def back_up_other_windows(patch: pytest.MonkeyPatch) -> None:
    original = CpuCopier.to_host

    def to_host(self, device, host) -> None:
        original(self, np.roll(device, 1) if self._num_layers == 2 else device, host)

    patch.setattr(CpuCopier, "to_host", to_host)


def chat(rig: Rig) -> None:
    """Turns that come back after their pages have left the device."""
    history = words(31, 14 * P)
    for turn in range(4):
        answer = rig.ask(history, P)
        history = history + answer.tokens + words(32 + turn, P)
        for other in range(2):
            rig.ask(words(200 + 10 * turn + other, 22 * P), P)


def tiered_rig(path: Path) -> Rig:
    hold = threading.Event()  # every layer of a load comes late, as it does on a slow machine
    hooks = TransferHooks(before_chunk=lambda *_: hold.wait(0.003), whole_layers=True)
    return open_rig(
        path,
        num_pages=34,
        window_pages=14,
        host_pages=300,
        window_host_pages=200,
        transfer_hooks=hooks,
        max_running=2,
    )


def test_the_chat_itself_is_green(windowed: Windowed) -> None:
    path, cold = windowed("gpt_oss", W)
    with tiered_rig(path) as rig:
        chat(rig)
        assert sum(a.sources.host for a in rig.answers.values()) > 0
        check_all(rig, cold)


@pytest.mark.parametrize(
    "mutate", [skip_a_layers_wait, leave_out_a_window_layer, back_up_other_windows]
)
def test_a_broken_rule_of_the_tiers_is_noticed(
    windowed: Windowed,
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
) -> None:
    path, cold = windowed("gpt_oss", W)
    cold.answer(words(1, 3), 1)
    rig = tiered_rig(path)
    with monkeypatch.context() as patch:
        mutate(patch)
        try:
            chat(rig)
            stopped = rig.loop.dead
        except AssertionError as error:
            stopped = str(error)
    assert noticed(rig, cold, stopped)
    rig.recorder.close()
    rig.loaded.transfers.close()
