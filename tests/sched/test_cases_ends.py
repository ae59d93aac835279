"""Cases about how requests end: aborts at any time, limits, errors of one row."""

from __future__ import annotations

import random

import pytest

from phloem.cache import check_invariants
from phloem.core.clock import VirtualClock
from phloem.core.errors import BadRequest, ConfigError, Overloaded
from phloem.core.request import FinishReason, SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.sched import SchedulerConfig
from phloem.sim import CostWorker, cold, hash_model
from tests.sched.rig import VOCAB, Rig, prompt_of

PAGE_SIZES = [1, 4, 16]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("where", ["queue", "prefill", "decode", "just_finishing"])
def test_o35_an_abort_frees_everything_at_once(where: str, overlap: bool, page_size: int):
    """Pages are free when `abort` returns, batch-mates and the next request are unaffected."""
    rng = random.Random(35)
    rig = Rig(
        page_size=page_size,
        num_pages=6000 // page_size,
        max_model_len=6000,
        max_running=2,
        max_prefill_tokens=3 * 16,
        overlap=overlap,
    )
    rig.add("mate", prompt_of(rng, 20), max_tokens=40)
    rig.step(2)
    if where == "queue":
        rig.add("other", prompt_of(rng, 8), max_tokens=30)
        rig.step(2)
    max_tokens = 3 if where == "just_finishing" else 5000
    rig.add("gone", prompt_of(rng, 100), max_tokens=max_tokens)
    rig.step({"queue": 1, "prefill": 1, "decode": 12, "just_finishing": 3}[where])
    state = rig.scheduler._requests["gone"]
    if where == "just_finishing":
        while state.num_outputs + state.num_pending < max_tokens - (not overlap):
            rig.step()  # overlap: its last step is in flight; else it is the next one
    else:
        phase = {"queue": "queued"}.get(where, where)
        assert state.phase.value == phase, "not where the case wants it"
    held = rig.cache.locked_pages
    rig.loop.abort("gone")
    check_invariants(rig.cache)
    assert rig.cache.locked_pages < held or where == "queue"
    ends = [chunk for name, chunk in rig.last.items() if name == "gone"]
    assert len(ends) == 1
    rig.add("next", prompt_of(rng, 30), max_tokens=10)
    rig.run()
    assert rig.last["mate"].finish is FinishReason.LENGTH
    assert rig.last["next"].finish is FinishReason.LENGTH
    rig.check_idle()


def test_o35_an_abort_after_the_end_says_nothing():
    """No second end, no abort counted."""
    rig = Rig()
    rig.add("r", [1, 2, 3], max_tokens=2)
    rig.run()
    rig.loop.abort("r")
    rig.loop.abort("never seen")
    assert dict(rig.loop.stats().finished_total)["abort"] == 0
    rig.check_idle()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_o36e_limits(page_size: int):
    """The last sampled token takes no position: prompt + max_tokens - 1 must fit in the context."""
    limit = 48
    rig = Rig(page_size=page_size, num_pages=64, max_model_len=limit)
    rng = random.Random(36)
    rig.add("one", prompt_of(rng, 7), max_tokens=1)
    rig.add("sum is limit", prompt_of(rng, 40), max_tokens=8)
    rig.add("prompt is limit", prompt_of(rng, limit), max_tokens=1)
    for length, max_tokens in ((limit + 1, 1), (limit, 2), (40, 10), (1, limit + 1)):
        with pytest.raises(BadRequest, match=rf"{length} prompt tokens.*{limit} tokens") as error:
            rig.add("over", prompt_of(rng, length), max_tokens=max_tokens)
        assert error.value.code == "context_length_exceeded"
        assert error.value.param == ("prompt" if length > limit else "max_tokens")
    rig.run()
    assert {chunk.finish for chunk in rig.last.values()} == {FinishReason.LENGTH}
    assert [len(rig.answers[name]) for name in rig.requests] == [1, 8, 1]
    assert all(row.start < limit for plan in rig.worker.plans for row in plan.rows)
    rig.check_idle()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_what_never_fits_in_the_pool_is_refused_with_the_numbers(page_size: int):
    """And what just fits, alone, runs to its end."""
    rig = Rig(page_size=page_size, num_pages=8)
    total = 8 * page_size
    with pytest.raises(BadRequest, match=r"need 9 KV pages.*the pool has 8"):
        rig.add("too long", [1] * total, max_tokens=2)
    with pytest.raises(BadRequest, match="the pool has 8"):
        rig.add("prompt too long", [1] * (total + 1), max_tokens=1)
    rig.add("fits", [1] * (total - 3), max_tokens=4)
    rig.run()
    assert rig.loop.stats().refused_total == 2
    rig.check_idle()


def test_bad_requests_are_refused_and_leave_no_trace():
    rig = Rig(max_queued=1)
    rig.add("a", [1], max_tokens=1)
    with pytest.raises(BadRequest, match="in use"):
        rig.scheduler.add(rig.requests["a"])
    with pytest.raises(BadRequest, match="at least one token"):
        rig.add("empty", [], max_tokens=1)
    with pytest.raises(Overloaded, match="1 requests are waiting"):
        rig.add("b", [1], max_tokens=1)
    rig.run()
    rig.add("a2", [1], max_tokens=1)
    rig.run()
    rig.check_idle()


def test_bad_settings_are_refused():
    for wrong in ({"max_running": 0}, {"max_prefill_tokens": -1}, {"headroom_tokens": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SchedulerConfig(max_model_len=10, **wrong)
    with pytest.raises(ConfigError, match="unknown schedule policy 'lmp'"):
        Rig(policy="lmp")


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_error_of_one_row_ends_that_request_only(page_size: int):
    """Its last step is not committed: what a failed row wrote is not to be trusted."""
    rig = Rig(
        page_size=page_size,
        num_pages=100,
        fail_row=lambda serial, index: "NaN in logits" if (serial, index) == (1, 2) else None,
    )
    for name, first in (("a", 1), ("bad", 2), ("c", 3)):
        rig.add(name, [first] * 9, max_tokens=8)
    rig.run()
    assert rig.last["bad"].finish is FinishReason.ERROR
    assert rig.last["bad"].error == "NaN in logits"
    assert len(rig.answers["bad"]) == 2
    assert {rig.last[name].finish for name in "ac"} == {FinishReason.LENGTH}
    rig.check_idle()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_what_a_failed_row_wrote_is_never_served(page_size: int):
    """Its step is not committed: the same prompt is computed anew."""
    rig = Rig(
        page_size=page_size,
        num_pages=100,
        fail_row=lambda serial, index: "NaN in logits" if serial == 0 else None,
    )
    prompt = list(range(50))
    rig.add("bad", prompt, max_tokens=8)
    rig.run()
    rig.add("again", prompt, max_tokens=8)
    rig.run()
    assert rig.last["bad"].finish is FinishReason.ERROR
    assert rig.last["again"].cached.total == 0
    rig.check_idle()


@pytest.mark.parametrize("overlap", [True, False])
def test_min_tokens_holds_back_every_stop(overlap: bool):
    """A stop id sampled before output number min_tokens neither ends nor appears."""
    prompt = [3, 1, 4]
    model = hash_model(VOCAB)
    plain = cold(model, tokens_to_bytes(prompt), SamplingParams(max_tokens=12))
    rig = Rig(overlap=overlap, eos_ids=(plain[2],))
    rig.add("short", prompt, max_tokens=12)
    rig.add("held", prompt, max_tokens=12, min_tokens=6)
    rig.add("ignores", prompt, max_tokens=12, ignore_eos=True)
    rig.run()
    assert rig.answers["short"] == plain[:3]
    assert rig.last["short"].stop_token == plain[2]
    assert plain[2] not in rig.answers["held"][:6]
    assert rig.answers["ignores"] == plain
    rig.check_idle()


def test_min_tokens_holds_even_if_the_worker_samples_a_stop():
    """Output number min_tokens is the first that may end the answer, whoever checks."""
    rig = Rig(eos_ids=(0,))
    rig.loop._worker = CostWorker(VirtualClock())  # it samples nothing but 0
    for min_tokens in (0, 1, 5):
        rig.add(str(min_tokens), [min_tokens, 1], max_tokens=9, min_tokens=min_tokens)
    rig.run()
    assert [len(answer) for answer in rig.answers.values()] == [1, 2, 6]
    assert {chunk.finish for chunk in rig.last.values()} == {FinishReason.STOP}


def test_very_long_prompts_under_load_start_too():
    """A match that costs more than the matches of one pass is still made."""
    rng = random.Random(11)
    rig = Rig(page_size=64, num_pages=12_000, max_model_len=600_000, max_prefill_tokens=300_000)
    rig.loop._worker = CostWorker(VirtualClock())
    rig.add("busy", prompt_of(rng, 64), max_tokens=5_000)
    rig.step(2)
    long = list(range(500_000))
    rig.add("long", long, max_tokens=2)
    rig.add("longer", [*long, 1], max_tokens=2)
    rig.step(100)
    assert {"long", "longer"} <= set(rig.last)
    assert rig.last["longer"].cached.total == 500_000 // 64 * 64
