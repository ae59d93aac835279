"""The leader's choice of how remote pages are read, against a simulated link."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from phloem.cache.remote_cost import LayerShape, LinkRates, StepShape, choose_remote, layer_seconds
from phloem.core.remote import Remote
from phloem.sim.links import remote_grid, right_share, simulate_step

SMOLLM2 = LayerShape(kv_bytes=2 * 3 * 64 * 2, q_bytes=9 * 64 * 2, partial_bytes=9 * (64 + 1) * 4)
FAST = LinkRates(latency_s=5e-6, bytes_s=20e9, linear_row_s=2e-7, pair_s=1e-10, read_bytes_s=0)


def pick(new: int, cached: int, rates: LinkRates = FAST, ranks: int = 2) -> tuple[Remote, Remote]:
    choice = choose_remote(StepShape(ranks=ranks, new=new, cached=cached), SMOLLM2, rates)
    return choice.cached, choice.own


def test_the_faster_way_is_picked_nearly_always():
    """Over shapes, ranks, links and processors; a pick within 1 % of the best is as good."""
    cells = list(remote_grid())
    assert len(cells) >= 400
    share = right_share(cells, num_layers=24)
    assert share >= 0.95, share
    ways = {(c.cached, c.own) for c in (choose_remote(s, y, r) for s, y, r in cells)}
    assert {a for a, _ in ways} == set(Remote), "a way is never the best: the grid is too narrow"


def test_so_it_is_where_keys_are_read_at_a_rate_and_requests_see_their_own_alone():
    """What leaders measure and count, and the grid leaves out: memory of one's own that takes time,
    and ten requests in a step."""
    cells = [
        (replace(step, seen=0.1, own_seen=0.1), layer, replace(rates, memory_bytes_s=10e9))
        for step, layer, rates in remote_grid()
    ]
    share = right_share(cells, num_layers=24)
    assert share >= 0.95, share


def test_a_few_tokens_on_a_long_prefix_travel_themselves():
    """28 times fewer bytes than the prefix (DESIGN 7), but over a wide link pages hide anyway."""
    slow = LinkRates(latency_s=5e-6, bytes_s=1e9, linear_row_s=2e-7, pair_s=1e-10)
    assert pick(64, 8192, slow)[0] is Remote.SEND_Q
    assert pick(8192, 8192, slow)[0] is Remote.GATHER_KV


@pytest.mark.parametrize(("read_bytes_s", "direct"), [(100e9, True), (1e7, False)])
def test_mapped_memory_is_read_in_place_unless_that_is_slow(read_bytes_s: float, direct: bool):
    rates = LinkRates(
        latency_s=2e-5, bytes_s=1e9, linear_row_s=4e-6, pair_s=4e-9, read_bytes_s=read_bytes_s
    )
    for new, cached in ((64, 8192), (8192, 8192)):
        assert (pick(new, cached, rates) == (Remote.DIRECT, Remote.DIRECT)) == direct


def test_nothing_possible_is_an_error():
    with pytest.raises(ValueError, match="no way"):
        choose_remote(StepShape(ranks=2, new=1, cached=1), SMOLLM2, FAST, [Remote.DIRECT])


@pytest.mark.parametrize("ways", [*itertools.product(Remote, Remote)], ids=str)
def test_a_link_without_cost_leaves_the_computing(ways):
    free = LinkRates(latency_s=0, bytes_s=1e18, linear_row_s=1e-6, pair_s=1e-9, read_bytes_s=1e18)
    step = StepShape(ranks=4, new=1024, cached=4096)
    wanted = 256 * 1e-6 + 256 * (4096 + (1024 + 4) / 2) * 1e-9
    assert layer_seconds(step, SMOLLM2, free, *ways) == pytest.approx(wanted, rel=1e-6)
    assert simulate_step(step, SMOLLM2, free, *ways, 10) == pytest.approx(10 * wanted, rel=1e-2)


def test_a_gather_hides_behind_the_computing_until_it_no_longer_fits():
    step = StepShape(ranks=2, new=512, cached=8192)
    computing = layer_seconds(step, SMOLLM2, FAST, Remote.GATHER_KV, Remote.SEND_Q)
    for factor, hidden in ((1, True), (1 / 64, False)):
        rates = LinkRates(
            latency_s=5e-6, bytes_s=FAST.bytes_s * factor, linear_row_s=2e-7, pair_s=1e-10
        )
        took = layer_seconds(step, SMOLLM2, rates, Remote.GATHER_KV, Remote.SEND_Q)
        assert (took < 1.1 * computing) == hidden
