"""The fake worker must notice what it is there to notice."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import replace

from phloem.core.plan import PageTableUpdate, StepPlan
from phloem.core.request import SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.sim import cold, hash_model, scripted_model
from tests.sched.rig import Rig, prompt_of


def broken_run(spoil, **config) -> Rig:
    """Two requests with a shared prefix, every plan passing through `spoil` on its way."""
    rng = random.Random(1)
    rig = Rig(page_size=4, num_pages=40, max_prefill_tokens=16, **config)
    submit = rig.worker.submit
    rig.worker.submit = lambda plan: submit(spoil(plan))
    head = prompt_of(rng, 16)
    rig.add("a", head + prompt_of(rng, 9), max_tokens=9)
    rig.add("b", head + prompt_of(rng, 7), max_tokens=9)
    while rig.step():
        pass
    return rig


def red(rig: Rig) -> bool:
    """Did anything notice?"""
    if rig.loop.dead is not None:
        return True
    try:
        rig.check_answers()
    except AssertionError:
        return True
    return False


def swap_two_pages(plan: StepPlan) -> StepPlan:
    updates = []
    for update in plan.table_updates:
        refs = update.refs.copy()
        if len(refs) > 1:
            refs[[0, 1]] = refs[[1, 0]]
        updates.append(PageTableUpdate(row=update.row, first_page=update.first_page, refs=refs))
    return replace(plan, table_updates=tuple(updates))


def shift_one_page(plan: StepPlan) -> StepPlan:
    updates = [
        replace(update, refs=np.roll(update.refs, 1)) if update.row == 1 else update
        for update in plan.table_updates
    ]
    return replace(plan, table_updates=tuple(updates))


def drop_late_updates(plan: StepPlan) -> StepPlan:
    return replace(plan, table_updates=()) if plan.step > 4 else plan


def free_a_page_in_use(plan: StepPlan) -> StepPlan:
    if plan.step != 4:
        return plan
    return replace(plan, freed_pages=np.array([0], dtype=np.int64))


def one_page_for_two_rows(plan: StepPlan) -> StepPlan:
    updates = [
        replace(update, refs=np.where(update.refs == update.refs[-1], 1, update.refs))
        for update in plan.table_updates
    ]
    return replace(plan, table_updates=tuple(updates))


def test_an_unspoilt_run_is_green():
    rig = broken_run(lambda plan: plan)
    assert not red(rig)
    rig.check_idle()


@pytest.mark.parametrize(
    "spoil",
    [shift_one_page, drop_late_updates, free_a_page_in_use, one_page_for_two_rows],
)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_spoilt_page_table_is_noticed(spoil, overlap: bool):
    assert red(broken_run(spoil, overlap=overlap))


def test_two_swapped_pages_of_a_shared_prefix_are_noticed():
    """In one row alone a swap is a consistent renaming; for a row that shares pages it is not."""

    def spoil(plan: StepPlan) -> StepPlan:
        return swap_two_pages(plan) if any(i.row == 1 for i in plan.admitted) else plan

    assert red(broken_run(spoil))


def test_a_lost_lock_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """A running request's prefix that another one's pages take over changes an answer."""
    monkeypatch.setattr("phloem.cache.leader.Leader.lock", lambda *args: None)
    monkeypatch.setattr("phloem.cache.leader.Leader.unlock", lambda *args: None)
    noticed = False
    for seed in range(10):
        rng = random.Random(seed)
        rig = Rig(page_size=4, num_pages=24, headroom_tokens=0)
        try:
            for number in range(6):
                rig.add(str(number), prompt_of(rng, 20), max_tokens=30)
                rig.step(3)
            rig.run()
            rig.check_answers()
        except AssertionError:
            noticed = True
    assert noticed


def test_cold_reads_every_token_in_order():
    """One changed or swapped token anywhere changes the answer."""
    model = hash_model(50_000)
    prompt = list(range(1, 60))
    sampling = SamplingParams(max_tokens=4)
    answers = {tuple(cold(model, tokens_to_bytes(prompt), sampling))}
    for position in range(58):
        swapped = prompt.copy()
        swapped[position], swapped[position + 1] = swapped[position + 1], swapped[position]
        answers.add(tuple(cold(model, tokens_to_bytes(swapped), sampling)))
    assert len(answers) == 59


def test_a_scripted_model_says_what_it_is_told():
    first, second = tokens_to_bytes([1, 2]), tokens_to_bytes([3])
    rig = Rig(model=scripted_model({first: [10, 11, 12], second: [20]}, after=9), eos_ids=(9,))
    rig.add("a", [1, 2], max_tokens=2)
    rig.add("b", [3], max_tokens=8)
    rig.add("c", [4], max_tokens=8)
    rig.run()
    assert rig.answers == {"a": [10, 11], "b": [20, 9], "c": [9]}
    rig.check_idle()
