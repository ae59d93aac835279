"""The sampler on its own: filters, penalties, seeds, log-probabilities."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from phloem.core.plan import RowInit, RowPlan, StepPlan
from phloem.core.request import SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.worker.filters import filter_logits
from phloem.worker.randomness import uniform
from phloem.worker.rows import RowTables
from phloem.worker.sampler import Candidate, sample

VOCAB = 50


def candidate(
    index: int = 0,
    *,
    seed: int = 0,
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    stop_ids: tuple[int, ...] = (),
    **sampling: Any,
) -> Candidate:
    """A row whose request has produced `output`, about to sample number `index`."""
    params = SamplingParams(**{"max_tokens": 1000, **sampling})
    tables = RowTables(max_running=1, max_pages=1)
    init = RowInit(
        row=0,
        serial=1,
        sampling=params,
        seed=seed,
        stop_ids=stop_ids,
        tokens=tokens_to_bytes(list(prompt + output)),
        num_prompt_tokens=len(prompt),
    )
    tables.apply(StepPlan(step=0, rows=(), admitted=(init,)))
    plan = RowPlan(row=0, serial=1, start=5, count=1, tokens=None, sample=True, output_index=index)
    state = tables.state(plan)
    assert state is not None
    return Candidate(plan, state)


def logits(seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, VOCAB)).float()


def draw(row: torch.Tensor, count: int = 2000, **sampling: Any) -> Counter[int]:
    """How often each token comes, over many output indices of one seed."""
    out: Counter[int] = Counter()
    for low in range(0, count, 200):
        rows = [candidate(i, seed=42, **sampling) for i in range(low, low + 200)]
        out.update(r.token for r in sample(row.repeat(200, 1), rows))
    return out


def allowed(row: torch.Tensor, **sampling: Any) -> set[int]:
    """By the definition, slowly: what the filters leave."""
    t = sampling.get("temperature", 1.0)
    kept = {i: row[i].item() / t for i in range(VOCAB)}
    if sampling.get("min_p"):
        best = max(kept.values())
        kept = {i: v for i, v in kept.items() if math.exp(v - best) >= sampling["min_p"]}
    if sampling.get("top_k"):
        kept = dict(sorted(kept.items(), key=lambda kv: -kv[1])[: sampling["top_k"]])
    if sampling.get("top_p", 1.0) < 1.0:
        total = sum(math.exp(v) for v in kept.values())
        mass, nucleus = 0.0, {}
        for i, v in sorted(kept.items(), key=lambda kv: -kv[1]):
            nucleus[i] = v
            mass += math.exp(v) / total
            if mass >= sampling["top_p"]:
                break
        kept = nucleus
    return set(kept)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
        {"temperature": 0.5, "top_p": 0.9},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(sampling):
    row = logits()
    kept = sorted(allowed(row, **sampling))
    counts = draw(row, **sampling)
    assert set(counts) <= set(kept)
    probs = torch.softmax(row[kept] / sampling.get("temperature", 1.0), dim=0)
    for token, p in zip(kept, probs.tolist(), strict=True):
        spread = math.sqrt(p * (1 - p) / 2000)
        assert abs(counts[token] / 2000 - p) < 5 * spread + 1e-3, token


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1 - 1e-9])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 6.0])
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p, spread):
    """From flat to peaked, against a full sort."""
    row = torch.from_numpy(np.random.default_rng(2).normal(0, spread, 3000)).float()
    filtered = row[None].clone()
    filter_logits(filtered, [SamplingParams(top_p=top_p)])
    order = row.argsort(descending=True)
    mass = torch.softmax(row.double(), dim=0)[order].cumsum(0)
    size = int((mass < top_p).sum()) + 1
    assert set(filtered[0].isfinite().nonzero()[:, 0].tolist()) == set(order[:size].tolist())


def test_equal_logits_at_the_border_stay_together():
    row = torch.full((VOCAB,), -5.0)
    row[[3, 8, 30]] = 1.0
    assert set(draw(row, top_k=2)) == {3, 8, 30}


def test_greedy_and_the_smallest_temperature_choose_the_best():
    row = logits()
    for temperature in (0.0, 1e-30, 1e-6):
        (result,) = sample(row[None].clone(), [candidate(temperature=temperature)])
        assert result.token == int(row.argmax())


def test_a_draw_depends_on_seed_and_index_only():
    """Not on batch-mates, their order or their number."""
    row = logits()
    alone = [
        sample(row[None].clone(), [candidate(i, seed=7, top_p=0.9)])[0].token for i in range(20)
    ]
    mates = [candidate(i, seed=99, temperature=0.0, logprobs=2) for i in range(20)]
    mixed = [x for i in range(20) for x in (mates[i], candidate(i, seed=7, top_p=0.9))]
    stack = torch.stack([logits(i + 5) if j == 0 else row for i in range(20) for j in range(2)])
    assert [r.token for r in sample(stack, mixed)[1::2]] == alone
    other = [sample(row[None].clone(), [candidate(i, seed=8)])[0].token for i in range(20)]
    assert other != alone


def test_uniform_is_uniform_and_replayable():
    values = np.array([uniform(seed, i) for seed in (-(2**63), 0, 2**64 - 1) for i in range(4000)])
    assert 0.0 <= values.min() <= values.max() < 1.0
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert abs(counts - 1200).max() < 5 * math.sqrt(1200)
    assert uniform(5, 6) == uniform(5, 6) != uniform(6, 5)


def test_logprobs_are_those_of_the_model_before_bias_and_filters():
    row = logits()
    want = torch.log_softmax(row, dim=0)
    worst = int(row.argmin())
    c = candidate(logprobs=3, temperature=0.0, logit_bias=((worst, 100.0),), top_k=1)
    (result,) = sample(row[None].clone(), [c])
    assert result.token == worst
    assert result.logprob is not None
    assert result.logprob.token == worst
    assert result.logprob.logprob == pytest.approx(float(want[worst]), abs=1e-6)
    values, ids = want.topk(3)
    assert [t for t, _ in result.logprob.top] == ids.tolist()
    assert [v for _, v in result.logprob.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_logprobs_zero_reports_the_token_alone():
    (result,) = sample(logits()[None].clone(), [candidate(logprobs=0)])
    assert result.logprob is not None
    assert result.logprob.top == ()
    (without,) = sample(logits()[None].clone(), [candidate()])
    assert without.logprob is None


def test_min_tokens_bans_the_stop_ids_until_then():
    row = torch.zeros(VOCAB)
    row[9], row[4] = 5.0, 3.0
    for index, want in ((0, 4), (2, 4), (3, 9)):
        c = candidate(index, temperature=0.0, min_tokens=3, stop_ids=(9, 10**6))
        assert sample(row[None].clone(), [c])[0].token == want


def penalised(row: torch.Tensor, **options: Any) -> torch.Tensor:
    """The adjusted logits, read through log-probabilities of a bias-free softmax."""
    copy = row[None].clone()
    sample(copy, [candidate(temperature=0.0, **options)])
    return copy[0]


def test_penalties_count_output_and_repetition_counts_both():
    row = logits()
    got = penalised(
        row,
        prompt=(1, 2, 2),
        output=(2, 3, 3, 3),
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.7,
    )
    want = row.clone()
    for token in (1, 2, 3):
        want[token] = want[token] / 1.7 if want[token] > 0 else want[token] * 1.7
    want[2] -= 0.5 + 0.25
    want[3] -= 0.5 + 0.25 * 3
    assert torch.allclose(got, want, atol=1e-6)


def test_sampled_tokens_are_counted_from_then_on():
    row = torch.zeros(VOCAB)
    row[7], row[8] = 1.0, 0.5
    c = candidate(temperature=0.0, frequency_penalty=1.0)
    assert sample(row[None].clone(), [c])[0].token == 7
    c.state.note(7)
    assert sample(row[None].clone(), [c])[0].token == 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_row_fails_alone(bad):
    stack = torch.stack([logits(), logits(1), logits()])
    stack[1, 3] = bad
    rows = [candidate(i, logprobs=1, top_p=0.9) for i in range(3)]
    good = sample(torch.stack([logits(), logits()]), [rows[0], rows[2]])
    results = sample(stack, rows)
    assert [results[0], results[2]] == good
    assert results[1].error is not None
    assert results[1].token == -1
    assert results[1].logprob is None
