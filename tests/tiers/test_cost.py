"""The cost model: what it chooses against what would have been best."""

from __future__ import annotations

import random

import pytest

from phloem.core.transfer import TransferKind
from phloem.tiers import CostModel
from phloem.tiers.cost import Forced, Line, Way
from tests.sched.rig import Rig

PAGE = 16
PAGE_BYTES = 400_000
BANDWIDTHS = (2e7, 1e8, 5e8, 2e9, 1e10, 5e10)
PREFILL_RATES = (50.0, 400.0, 3_000.0, 30_000.0)
PAGES = (1, 4, 16, 64, 256, 512)
NEW_TOKENS = (1, 64, 2048)


class Machine:
    """What really happens: fixed costs, a bandwidth, a prefill rate, and noise in every figure."""

    def __init__(self, bandwidth: float, rate: float, rng: random.Random, noise: float) -> None:
        self.per_page = PAGE_BYTES / bandwidth
        self.per_token = 1 / rate
        self.rng, self.noise = rng, noise

    def load_s(self, pages: int) -> float:
        return 1e-4 + self.per_page * pages if pages else 0.0

    def prefill_s(self, tokens: int) -> float:
        return 2e-3 + self.per_token * tokens

    def total_s(self, loaded: int, pages: int, new: int) -> float:
        return max(self.load_s(loaded), self.prefill_s(new + (pages - loaded) * PAGE))

    def measured(self, seconds: float) -> float:
        return seconds * (1 + self.noise * (self.rng.random() - 0.5))

    def taught(self, count: int = 60) -> CostModel:
        model = CostModel(page_bytes=PAGE_BYTES, page_size=PAGE)
        for _ in range(count):
            pages, tokens = self.rng.randrange(1, 400), self.rng.randrange(1, 4000)
            seconds = self.measured(self.load_s(pages))
            model.observe_transfer(TransferKind.LOAD_BACK, pages, seconds)
            model.observe_prefill(tokens, self.measured(self.prefill_s(tokens)))
        return model


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_regret_over_a_grid_of_bandwidths_and_lengths(noise: float):
    """Time of what is chosen over the best k of all: at most 1.02 on the mean."""
    rng = random.Random(7)
    regrets = []
    for bandwidth in BANDWIDTHS:
        for rate in PREFILL_RATES:
            machine = Machine(bandwidth, rate, rng, noise)
            model = machine.taught()
            for pages in PAGES:
                for new in NEW_TOKENS:
                    chosen = model.choose_load(pages, new).pages
                    best = min(machine.total_s(k, pages, new) for k in range(pages + 1))
                    regrets.append(machine.total_s(chosen, pages, new) / best)
    assert min(regrets) >= 1.0
    assert sum(regrets) / len(regrets) <= 1.02
    assert max(regrets) <= (1.02 if noise == 0.0 else 1.15)


def test_it_loads_recomputes_or_does_both():
    rng = random.Random(8)
    fast, slow, middling = (
        Machine(bandwidth, 3_000.0, rng, 0.0).taught() for bandwidth in (1e10, 1e6, 1e8)
    )
    assert fast.choose_load(100, 10).pages == 100
    assert slow.choose_load(100, 10).pages <= 2
    part = middling.choose_load(100, 10)
    assert 20 < part.pages < 80
    assert part.chosen_s < min(part.load_all_s, part.recompute_s)


def test_before_anything_is_measured_a_load_is_taken_to_pay():
    assert CostModel(page_bytes=PAGE_BYTES, page_size=PAGE).choose_load(50, 16).pages == 50


def test_a_line_follows_what_changes():
    line = Line(0.0, 1.0)
    for units in range(1, 100):
        line.observe(units, 1 + 2 * units)
    assert line.seconds(1000) == pytest.approx(2001, rel=0.01)
    for units in range(1, 200):
        line.observe(units, 5 * units)
    assert line.seconds(1000) == pytest.approx(5000, rel=0.01)


def test_decodes_do_not_pass_for_slow_prefills():
    """A thousand one-token steps of 30 ms leave the price of a prompt's token as it was."""
    rig = Rig(page_size=4, num_pages=16, host_pages=64)
    for tokens in (64, 256, 1024):
        rig.tiers.observe_step(tokens, tokens, 0.03 + tokens / 1000)
    for _ in range(1000):
        rig.tiers.observe_step(1, 1, 0.03)
    assert rig.tiers.cost.prefill_rate == pytest.approx(1000, rel=0.01)


WINDOW_BYTES = 1_200_000  # of a page of the window layers: three times those of the full ones


def ways_of(rng: random.Random) -> list[Way]:
    """What a long prompt whose window has left the device offers, and never all of it."""
    pages = rng.choice((16, 64, 256))
    tail = rng.choice((1, 8, 32))
    shorter, restart = sorted(rng.randrange(pages * PAGE) // PAGE * PAGE for _ in range(2))
    ways = [Way(start=shorter), Way(start=restart)]
    for _ in range(rng.randrange(4)):  # tails on the host, some of them below pages on the host
        length = rng.randrange(pages // 2, pages)
        ways.append(Way(start=length * PAGE, window_pages=tail))
        ways.append(Way(start=(length + 4) * PAGE, full_pages=4, window_pages=tail))
    return ways


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_regret_of_restart_shorter_match_and_load(noise: float):
    """Time of the way that is chosen over the best one's: at most 1.02 on the mean."""
    rng = random.Random(9)
    regrets = []
    used = set()
    for bandwidth in BANDWIDTHS:
        for rate in PREFILL_RATES:
            machine = Machine(bandwidth, rate, rng, noise)
            machine.per_page = WINDOW_BYTES / bandwidth  # the unit of transfers
            model = CostModel(page_bytes=PAGE_BYTES, window_page_bytes=WINDOW_BYTES, page_size=PAGE)
            for _ in range(60):
                pages, tokens = rng.randrange(1, 400), rng.randrange(1, 4000)
                component = rng.randrange(2)
                units = pages * (1.0 if component else PAGE_BYTES / WINDOW_BYTES)
                model.observe_transfer(
                    TransferKind.LOAD_BACK,
                    model.in_pages(component, pages),
                    machine.measured(machine.load_s(units)),
                )
                model.observe_prefill(tokens, machine.measured(machine.prefill_s(tokens)))

            def really_s(way: Way, num_tokens: int, machine: Machine = machine) -> float:
                units = way.window_pages + way.full_pages * PAGE_BYTES / WINDOW_BYTES
                return max(machine.load_s(units), machine.prefill_s(num_tokens - way.start))

            for _ in range(20):
                ways = ways_of(rng)
                num_tokens = max(way.start for way in ways) + rng.randrange(1, 2048)
                chosen = model.choose_way(ways, num_tokens)
                best = min(really_s(way, num_tokens) for way in ways)
                regrets.append(really_s(chosen, num_tokens) / best)
                used.add(chosen.loads)
    assert used == {False, True}
    assert min(regrets) >= 1.0
    assert sum(regrets) / len(regrets) <= 1.02
    # A few pages, when loads of hundreds were measured: noise hides what a transfer costs at least.
    assert max(regrets) <= (1.02 if noise == 0.0 else 1.5)


def test_of_ways_that_take_as_long_the_one_that_moves_least_is_taken():
    model = CostModel(page_bytes=PAGE_BYTES, window_page_bytes=WINDOW_BYTES, page_size=PAGE)
    same = [Way(start=64, window_pages=2), Way(start=64), Way(start=32)]
    assert model.choose_way(same, 100) == Way(start=64)


def test_a_forced_way_is_taken_whatever_it_costs():
    model = CostModel(page_bytes=PAGE_BYTES, window_page_bytes=WINDOW_BYTES, page_size=PAGE)
    ways = [Way(start=0), Way(start=48), Way(start=64, window_pages=10**9)]
    assert model.choose_way(ways, 100).start == 48
    model.forced = Forced.LOAD
    assert model.choose_way(ways, 100).start == 64
    model.forced = Forced.RECOMPUTE
    assert model.choose_way(ways, 100).start == 48


def test_transfers_are_measured_in_bytes_whatever_component_they_move():
    """A page of each component, in turn: one speed, told in bytes a second."""
    model = CostModel(page_bytes=PAGE_BYTES, window_page_bytes=WINDOW_BYTES, page_size=PAGE)
    for pages in range(1, 50):
        for component, size in enumerate((PAGE_BYTES, WINDOW_BYTES)):
            seconds = pages * size / 1e9
            model.observe_transfer(
                TransferKind.LOAD_BACK, model.in_pages(component, pages), seconds
            )
    assert model.bandwidth(TransferKind.LOAD_BACK) == pytest.approx(1e9)
    spine = CostModel(page_bytes=0, window_page_bytes=WINDOW_BYTES, page_size=PAGE)
    assert spine.in_pages(0, 100) == 0.0
    assert spine.choose_way([Way(start=0), Way(start=64, full_pages=99)], 65).start == 64
