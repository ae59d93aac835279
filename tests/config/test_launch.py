"""Starts by somebody else, as their variables tell."""

from __future__ import annotations

import pytest

from phloem.config import Config, ParallelOptions, TierOptions
from phloem.config.launch import Launch, check_launch, launch_from
from phloem.core.errors import ConfigError

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_what_torchrun_sets_and_what_is_set_by_hand() -> None:
    """Red if rank 0 would serve a store where torchrun's stands, or nobody where none does."""
    assert launch_from(TORCHRUN) == Launch(
        rank=1,
        size=4,
        local_size=2,
        local_rank=1,
        address="10.0.0.7",
        port=29500,
        keeps_store=False,
    )
    by_hand = launch_from(BY_HAND)
    assert by_hand is not None
    assert (by_hand.keeps_store, by_hand.local_size, by_hand.local_rank) == (True, 1, 0)
    agent = launch_from({**TORCHRUN, "RANK": "0"})
    other = launch_from({**BY_HAND, "RANK": "1"})
    assert agent is not None
    assert other is not None
    assert not agent.keeps_store
    assert not other.keeps_store


def test_which_process_of_its_machine_one_is() -> None:
    """It takes the GPU of that number. Red if it takes that of its rank among all."""
    for variables, local in [
        ({"RANK": "3"}, 1),  # torchrun says so
        ({"RANK": "3", "LOCAL_RANK": "0"}, 0),
        ({"RANK": "3", "LOCAL_RANK": None}, 1),  # ranks of a machine follow each other
        ({"RANK": "3", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": None}, 0),  # alone on it
    ]:
        environ = {k: v for k, v in {**TORCHRUN, **variables}.items() if v is not None}
        launch = launch_from(environ)
        assert launch is not None
        assert launch.local_rank == local


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"MASTER_PORT": "x"}])
def test_a_process_that_stands_alone_is_no_rank(environ: dict[str, str]) -> None:
    assert launch_from(environ) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"RANK": None}, "RANK is not"),
        ({"RANK": "2"}, "from 0 to 1, got '2'"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE must be a number"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not"),
        ({"MASTER_ADDR": "node..0"}, "MASTER_ADDR must be a name or an address"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT must be a number"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE must be"),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK must be a number from 0 to 1"),
    ],
)
def test_half_a_start_is_refused(change: dict[str, str | None], says: str) -> None:
    environ = {k: v for k, v in {**BY_HAND, **change}.items() if v is not None}
    with pytest.raises(ConfigError, match=says):
        launch_from(environ)


TRAVELS = ParallelOptions(cp=4, remote_kv="send_q")
ROWS = ParallelOptions(cp=2, tp=2)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Config(), "4 processes were started .* --cp 1 needs 1"),
        (Config(parallel=ParallelOptions(cp=4, remote_kv="direct")), "--remote-kv direct"),
        (Config(parallel=ParallelOptions(cp=4, placement="replicate")), "--placement replicate"),
        (Config(parallel=ParallelOptions(cp=3, tp=2)), "--cp 3 --tp 2 needs 6.* --cp 2 --tp 2$"),
        (Config(parallel=ParallelOptions(tp=3)), "--cp 1 --tp 3 needs 3: start so many$"),
    ],
)
def test_what_ranks_of_several_hosts_cannot_do_is_one_line(config: Config, says: str) -> None:
    launch = launch_from(TORCHRUN)
    assert launch is not None
    with pytest.raises(ConfigError, match=says) as refusal:
        check_launch(config, launch)
    assert "\n" not in str(refusal.value)


def test_ranks_that_torchrun_starts_on_one_machine_can_do_what_others_can() -> None:
    launch = launch_from({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"})
    assert launch is not None
    parallel = ParallelOptions(cp=4)
    check_launch(Config(parallel=parallel, tiers=TierOptions(storage="/tmp/x")), launch)
    with pytest.raises(ConfigError, match="--cp 1 needs 1"):
        check_launch(Config(), launch)


@pytest.mark.parametrize("parallel", [TRAVELS, ROWS, ParallelOptions(tp=4)], ids=str)
def test_pages_that_travel_between_hosts_and_rows_are_fine(parallel: ParallelOptions) -> None:
    launch = launch_from(TORCHRUN)
    assert launch is not None
    check_launch(Config(parallel=parallel, tiers=TierOptions(storage="/tmp/x")), launch)
