"""The leader's choice for each step: what it is made by, when it changes, what is remembered."""

from __future__ import annotations

import pytest

from phloem.cache.remote_choice import REMEMBERED, RemoteChooser, RemoteModel
from phloem.cache.remote_cost import LayerShape, StepShape, layer_seconds
from phloem.core.plan import RowPlan
from phloem.core.remote import IN_PLACE, LinkRates, Remote, RemoteWays

SMOLLM2 = LayerShape(kv_bytes=768, q_bytes=1152, partial_bytes=2340)
LATENTS = LayerShape(kv_bytes=1152, q_bytes=147456, partial_bytes=262656)
# As measured between two processes of one machine with AVX2.
MAPPED = LinkRates(
    latency_s=4e-5,
    bytes_s=3e9,
    linear_row_s=4e-6,
    pair_s=4e-9,
    read_bytes_s=9e9,
    memory_bytes_s=9.5e9,
)
ETHERNET = LinkRates(latency_s=2e-5, bytes_s=1e9, linear_row_s=2e-7, pair_s=1e-10)


def chooser(rates: LinkRates, layer: LayerShape = SMOLLM2, ranks: int = 2) -> RemoteChooser:
    return RemoteChooser(model=RemoteModel(ranks=ranks, page_size=16, layer=layer, rates=rates))


def row(start: int, count: int) -> RowPlan:
    return RowPlan(row=0, serial=0, start=start, count=count, tokens=None, sample=False)


STEPS = {
    "one token": [(8192, 1)],
    "a long chunk": [(0, 8192)],
    "64 on 8K": [(8192, 64)],
    "decodes": [(4000, 1)] * 64,
    "a chunk among decodes": [(4000, 1)] * 32 + [(16384, 2048)],
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layer", [SMOLLM2, LATENTS], ids=["gqa", "mla"])
def test_memory_that_is_as_near_as_ones_own_is_read_in_place(steps: str, ranks: int, layer) -> None:
    """Whatever the model promises of anything else: it is what has been measured."""
    rows = [row(*each) for each in STEPS[steps]]
    assert chooser(MAPPED, layer, ranks).choose(0, rows) == IN_PLACE


def test_a_promise_within_the_error_of_the_figures_changes_nothing() -> None:
    """Far memory is read in place as long as nothing else is faster by a tenth of the layer."""
    for rows, share, row_s, stays in (
        ([row(131072, 1)], 0.95, 4e-6, True),
        ([row(131072, 1)], 0.1, 4e-6, False),
        ([row(2048, 2048)], 0.45, 4e-6, False),
        ([row(2048, 2048)], 0.45, 4e-5, True),
    ):
        rates = LinkRates(
            latency_s=1e-6,
            bytes_s=3e9,
            linear_row_s=row_s,
            pair_s=1e-10,
            read_bytes_s=9e9 * share,
            memory_bytes_s=9e9,
        )
        assert (chooser(rates).choose(0, rows) == IN_PLACE) == stays


def test_where_nothing_is_mapped_queries_or_pages_travel() -> None:
    few = chooser(ETHERNET).choose(0, [row(8192, 64)])
    many = chooser(ETHERNET).choose(0, [row(8192, 8192)])
    wide = chooser(ETHERNET, LATENTS).choose(0, [row(8192, 512)])
    assert few == RemoteWays.all(Remote.SEND_Q)
    assert many.cached is Remote.GATHER_KV
    assert wide == RemoteWays.all(Remote.GATHER_KV)  # a query of 128 heads is as much as 128 rows


def test_a_decision_tells_what_was_expected_of_every_way() -> None:
    made = chooser(ETHERNET)
    ways = made.choose(7, [row(8192, 64)])
    (decision,) = made.newest(5)
    assert (decision.step, decision.requests) == (7, 1)
    assert (decision.new_tokens, decision.cached_tokens) == (64, 8192)
    assert decision.choices[0].ways == ways
    seconds = [choice.layer_s for choice in decision.choices]
    assert len(seconds) == 4  # two ways for each part: nothing is mapped
    assert seconds == sorted(seconds)
    shape = StepShape(ranks=2, new=64, cached=8192)
    for choice in decision.choices:
        want = layer_seconds(shape, SMOLLM2, ETHERNET, choice.cached, choice.own)
        assert choice.layer_s == pytest.approx(want)


def test_a_request_sees_its_own_tokens_alone() -> None:
    """64 decodes of 4,096 tokens each cost what one request of 64 on 4,096 costs, not 64 times."""
    made = chooser(ETHERNET)
    made.choose(0, [row(4096, 1)] * 64)
    made.choose(1, [row(4096, 64)])
    alone, together = made.newest(2)
    compute = RemoteWays.all(Remote.SEND_Q)
    cost = {
        each.step: next(c.layer_s for c in each.choices if c.ways == compute)
        for each in (alone, together)
    }
    assert cost[0] == pytest.approx(cost[1], rel=0.1)


def test_steps_that_hardly_differ_are_priced_once() -> None:
    made = chooser(ETHERNET)
    for step in range(3):
        made.choose(step, [row(8192 + step, 1)])
    first, second, third = made.newest(3)
    assert first.choices is second.choices is third.choices
    made.choose(3, [row(12000, 1)])
    assert made.newest(1)[0].choices is not first.choices


def test_the_memory_of_decisions_is_bounded_and_the_counts_are_not() -> None:
    made = chooser(MAPPED)
    for step in range(REMEMBERED + 10):
        made.choose(step, [row(step, 1)])
    newest = made.newest(10_000)
    assert [each.step for each in newest[:2]] == [REMEMBERED + 9, REMEMBERED + 8]
    assert len(newest) == REMEMBERED
    assert made.stats().steps_total == (("direct", "direct", REMEMBERED + 10),)
    assert made.stats().rates == MAPPED


def test_a_prescribed_way_is_counted_and_not_explained() -> None:
    ways = RemoteWays(cached=Remote.SEND_Q, own=Remote.GATHER_KV)
    made = RemoteChooser(ways)
    assert [made.choose(step, [row(0, 5)]) for step in range(3)] == [ways] * 3
    assert made.stats().steps_total == (("send_q", "gather_kv", 3),)
    assert (made.newest(5), made.stats().rates) == ([], None)
