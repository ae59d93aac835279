"""Replay over several ranks, on a small trace of our own; and the flags that ask for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phloem.cache import WindowConfig
from phloem.cache.remote_choice import RemoteModel
from phloem.cache.remote_cost import LayerShape
from phloem.cli.main import main
from phloem.core.remote import LinkRates
from phloem.sim import Ranks, ReplayReport, ReplayTarget, replay, simulated_target
from tests.sim.test_replay_windows import TRACE, write

MANY = 1000


def report(pages: int, ranks: Ranks, **settings: object) -> ReplayReport:
    return replay(TRACE, target=simulated_target(num_pages=pages, ranks=ranks, **settings))


@pytest.mark.parametrize("placement", ["striped", "contiguous", "replicate"])
@pytest.mark.parametrize("count", [2, 4])
def test_with_room_for_everything_the_ranks_make_no_difference(count: int, placement: str):
    found = report(MANY, Ranks(count=count, placement=placement))
    assert found.cached_by_request == replay(TRACE).cached_by_request
    assert found.evicted_pages == 0


def test_small_ranks_together_hold_what_none_of_them_does():
    """Four sessions of 18 pages on four ranks of 20; copies on each leave room for one."""
    shared = report(20, Ranks(count=4))
    copies = report(20, Ranks(count=4, placement="replicate"))
    assert shared.cached_by_request == replay(TRACE).cached_by_request
    assert copies.cached_by_request == report(20, Ranks()).cached_by_request
    assert copies.cached_tokens < shared.cached_tokens


def test_a_prompt_that_fits_on_all_ranks_alone_is_served():
    assert report(5, Ranks(count=4)).refused == 0
    assert report(5, Ranks(count=2)).refused == len(TRACE)
    assert report(5, Ranks(count=4, placement="replicate")).refused == len(TRACE)


@pytest.mark.parametrize("placement", ["striped", "contiguous"])
def test_windows_and_the_host_tier_come_along(placement: str):
    """Sessions whose pages have left all ranks come back from the one host of the machine."""
    window = WindowConfig(tokens=33, layers=1000, pages=(16,), host_pages=200)
    ranks = Ranks(count=2, placement=placement)
    found = report(16, ranks, host_pages=200, window=window)
    assert found.cached_by_request == replay(TRACE).cached_by_request
    assert found.host_tokens > 0


def test_rates_that_are_given_choose_how_simulated_steps_read():
    """As a real leader would by what it has measured: a slow link, and memory that is mapped."""
    layer = LayerShape(kv_bytes=768, q_bytes=1152, partial_bytes=2340)
    slow = LinkRates(latency_s=2e-5, bytes_s=1e8, linear_row_s=2e-7, pair_s=1e-10)
    for rates, ways in (
        (slow, {"gather_kv", "send_q"}),
        (replace(slow, read_bytes_s=1e10), {"direct"}),
    ):
        remote = RemoteModel(ranks=2, page_size=16, layer=layer, rates=rates)
        target = simulated_target(num_pages=MANY, ranks=Ranks(count=2, remote=remote))
        loops = []

        def keep(emit, target=target, loops=loops):
            loops.append(target.make_loop(emit))
            return loops[0]

        found = replay(TRACE, target=ReplayTarget(make_loop=keep))
        assert found.cached_by_request == replay(TRACE).cached_by_request
        stats = loops[0].stats()
        steps = stats.remote.steps_total
        assert sum(count for _, _, count in steps) == stats.steps_total
        assert {way for cached, own, _ in steps for way in (cached, own)} <= ways


def test_a_host_behind_copies_is_that_of_one_rank():
    """90 host pages are more than four times the 20 that each rank has, not the 80 of all."""
    copies = report(20, Ranks(count=4, placement="replicate"), host_pages=90)
    one = report(20, Ranks(), host_pages=90)
    assert copies == one
    assert one.host_tokens > 0


def test_the_command_has_flags_for_it(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = write(tmp_path / "trace.jsonl")
    cached = {}
    for placement in ("striped", "contiguous", "replicate"):
        flags = ["--cp", "4", "--placement", placement, "--pages", "20", "--json"]
        assert main(["replay", path, *flags]) == 0
        cached[placement] = json.loads(capsys.readouterr().out.splitlines()[-1])["cached_tokens"]
    assert cached["striped"] == cached["contiguous"] > cached["replicate"]
    assert main(["replay", path, "--cp", "2", "--model", "smollm2"]) == 2
    assert "--cp" in capsys.readouterr().err
