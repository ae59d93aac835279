"""From the settings and a checkpoint to the pools of its components."""

from __future__ import annotations

from pathlib import Path

import pytest

from phloem.config import (
    CacheOptions,
    Config,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    TierOptions,
)
from phloem.core.errors import ConfigError
from phloem.engine import build_pools
from phloem.engine.build_pools import Pools, plan_pools
from tests.models.checkpoints import make_checkpoint, make_windowed

WINDOW, PAGE = 12, 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint("llama", folder / "llama")
    for family in ("gemma3", "mistral"):
        make_windowed(family, folder / family, window=WINDOW)
    return folder


def pools(path: Path, *, host: str = "0", **cache) -> Pools:
    config = Config(
        model=ModelOptions(model=str(path), max_model_len=128),
        cache=CacheOptions(page_size=PAGE, **cache),
        tiers=TierOptions(host_memory=host),
        scheduler=SchedulerOptions(max_running=4, max_prefill_tokens=64),
    )
    return plan_pools(config, path, "fp32")


def test_a_model_without_windows_has_one_pool_of_what_was_asked(models: Path):
    found = pools(models / "llama", num_pages=50, host="4MB")
    assert found.device == (50,)
    assert len(found.host) == 1
    assert found.window is None


@pytest.mark.parametrize("memory", ["1MB", "3MB"])
def test_both_pools_fit_into_the_memory(models: Path, memory: str):
    found = pools(models / "gemma3", kv_memory=memory, host="2MB")
    used = sum(spec.page_bytes * n for spec, n in zip(found.specs, found.device, strict=True))
    assert int(memory[:-2]) * 1_000_000 * 0.95 < used <= int(memory[:-2]) * 1_000_000
    assert all(pages > 0 for pages in found.host)
    assert found.window is not None
    assert found.window.tokens == WINDOW
    assert found.window.num_pages == found.device[1] <= found.device[0]


def test_smaller_pages_are_more_pages_on_device_and_host(models: Path):
    """16 numbers a row: 64 bytes in fp32, 18 in int8, 9 in fp4."""
    plain = pools(models / "llama", kv_memory="1MB", host="2MB")
    for dtype, row_bytes in (("fp32", 64), ("bf16", 32), ("int8", 18), ("fp8", 18), ("fp4", 9)):
        found = pools(models / "llama", kv_memory="1MB", host="2MB", kv_dtype=dtype)
        for mine, others in zip(found.device + found.host, plain.device + plain.host, strict=True):
            assert others * 64 <= mine * row_bytes + 64
            assert mine * row_bytes <= (others + 1) * 64


def test_flags_change_ratio_and_checkpoints(models: Path):
    found = pools(models / "gemma3", num_pages=100, window_pool_ratio=0.4, window_checkpoint=20)
    assert found.device == (100, 40)
    assert found.window.checkpoint_tokens == 20
    assert pools(models / "gemma3", num_pages=100).window.checkpoint_tokens == 2048
    assert pools(models / "gemma3", num_pages=100, window_checkpoint=0).checkpoint == 0


def test_a_model_of_windows_alone_has_a_spine_without_bytes(models: Path):
    found = pools(models / "mistral", num_pages=30)
    assert found.specs[0].page_bytes == 0
    assert found.device[1] == 30
    assert found.device[0] >= 32, "a request of 128 tokens must fit"


def test_too_little_memory_says_which_flag(models: Path):
    with pytest.raises(ConfigError, match="--kv-memory"):
        pools(models / "gemma3", kv_memory="1KB")


def test_ranks_of_one_machine_divide_its_memory_and_those_of_several_do_not(
    models: Path, monkeypatch: pytest.MonkeyPatch
):
    """Red if a host of several gives its rank only a part of what it has free."""
    monkeypatch.setattr(build_pools, "available_memory_bytes", lambda: 8 << 20)
    path = models / "llama"
    config = Config(
        model=ModelOptions(model=str(path), max_model_len=128),
        cache=CacheOptions(page_size=PAGE),
        parallel=ParallelOptions(cp=4),
        scheduler=SchedulerOptions(max_running=4, max_prefill_tokens=64),
    )
    all_here, two_here, alone = (
        plan_pools(config, path, "fp32", ranks_here=count) for count in (None, 2, 1)
    )
    page_bytes = alone.specs[0].page_bytes
    assert alone.device == ((2 << 20) // page_bytes,)
    assert two_here.device == ((1 << 20) // page_bytes,)
    assert all_here.device == ((1 << 19) // page_bytes,)
    assert (all_here.ranks_here, two_here.ranks_here) == (4, 2)


def test_a_rank_of_a_row_holds_its_part_of_each_page(models: Path, monkeypatch: pytest.MonkeyPatch):
    """Two ranks that share a machine have between them what one rank has there; on a machine of
    its own each holds half of twice the pages. Red if a rank is taken to hold whole pages."""
    monkeypatch.setattr(build_pools, "available_memory_bytes", lambda: 8 << 20)
    path = models / "llama"

    def planned(ranks_here: int, **cache) -> tuple[int, ...]:
        config = Config(
            model=ModelOptions(model=str(path), max_model_len=128),
            cache=CacheOptions(page_size=PAGE, **cache),
            parallel=ParallelOptions(tp=2),
            scheduler=SchedulerOptions(max_running=4, max_prefill_tokens=64),
        )
        return plan_pools(config, path, "fp32", ranks_here=ranks_here).device

    page_bytes = pools(path, num_pages=1).specs[0].page_bytes
    assert planned(2) == ((2 << 20) // page_bytes,)
    assert planned(1) == ((4 << 20) // page_bytes,)
    assert planned(1, kv_memory="1MB") == (2_000_000 // page_bytes,)
    much = (10 << 20) // page_bytes
    assert planned(1, num_pages=much) == (much,)
    with pytest.raises(ConfigError, match=r"would take 10.0 MiB.*lower --num-pages"):
        planned(2, num_pages=much)
