"""Settings: every one is documented, typed, bounded, and reachable as a flag and as a YAML key."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from phloem.config import (
    CacheOptions,
    Config,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    ServerOptions,
    TierOptions,
)
from phloem.config.flags import FlagParser, add_settings, given_settings
from phloem.config.load import ENV_API_KEY, config_from, config_groups, read_config_file
from phloem.config.setting import settings_of
from phloem.config.units import format_bytes, parse_bytes
from phloem.core.errors import ConfigError

ALL = [(group, item) for group, cls in config_groups().items() for item in settings_of(cls)]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "phloem.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("group", "item"), ALL, ids=[item.name for _, item in ALL])
def test_every_setting_has_a_doc_line(group: str, item) -> None:
    assert 10 <= len(item.doc) <= 90, item.name
    assert item.doc == item.doc.strip().rstrip("."), item.name


@pytest.mark.parametrize("cls", config_groups().values(), ids=lambda cls: cls.__name__)
def test_every_field_is_a_setting_and_frozen(cls: type) -> None:
    assert [f.name for f in dataclasses.fields(cls)] == [s.name for s in settings_of(cls)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(cls(), settings_of(cls)[0].name, None)


def test_names_are_unique_over_all_groups_and_aliases() -> None:
    keys = [key for _, item in ALL for key in item.keys]
    assert len(keys) == len(set(keys))


def test_yaml_can_hold_every_flag(tmp_path: Path) -> None:
    """Each setting written to a file under its dashed name comes back as given."""
    values = {
        "model": "here",
        "dtype": "bf16",
        "quantization": "int8",
        "device": "cpu",
        "served_model_name": "m",
        "max_model_len": 99,
        "page_size": 4,
        "num_pages": 7,
        "kv_memory": "auto",
        "prefix_cache": True,  # the tiers below need it
        "eviction_policy": "lru",
        "window_pool_ratio": 0.25,
        "window_checkpoint": 512,
        "kv_dtype": "fp8",
        "host_memory": "1GB",
        "write_policy": "write_back",
        "prefetch_policy": "timeout",
        "storage": "/kept",
        "storage_size": "2GB",
        "cp": 2,
        "tp": 3,
        "placement": "contiguous",
        "remote_kv": "send_q",
        "join_timeout_s": 4.5,
        "verify_collectives": True,
        "hot_replicas": "0.25",
        "schedule_policy": "hrrn",
        "max_prefill_tokens": 128,
        "prefill_slice": 64,
        "max_running": 3,
        "max_queued": 5,
        "overlap": False,
        "host": "0.0.0.0",
        "port": 1234,
        "api_key": "k",
        "drain_timeout_s": 1.5,
        "threads": 2,
        "kernels": "native",
        "log_level": "error",
    }
    assert set(values) == {item.name for _, item in ALL}
    text = "".join(f"{key.replace('_', '-')}: {value}\n" for key, value in values.items())
    config = config_from({}, file=write(tmp_path, text), environ={})
    got = {item.name: getattr(getattr(config, group), item.name) for group, item in ALL}
    assert got == values


def test_command_line_wins_over_file_wins_over_environment(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 1\napi-key: from-file\nmax-running: 9\n")
    config = config_from({"port": "2"}, file=file, environ={ENV_API_KEY: "from-env"})
    assert (config.server.port, config.server.api_key, config.scheduler.max_running) == (
        2,
        "from-file",
        9,
    )
    assert config_from({}, environ={ENV_API_KEY: "from-env"}).server.api_key == "from-env"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 3\n", "unknown key 'prot'; did you mean port?"),
        ("zzzzzz: 3\n", "unknown key 'zzzzzz'"),
        ("port: 1\nport: 2\n", "given twice"),
        ("page_size: 16\nblock-size: 3\n", "page_size is given twice"),
        ("page_size: many\n", "--page-size must be a whole number"),
        ("page_size: 0\n", "--page-size must be a whole number from 1"),
        ("page_size: 1.5\n", "--page-size must be a whole number"),
        ("port: true\n", "--port must be a whole number"),
        ("overlap: 'off'\n", "--overlap must be true or false"),
        ("dtype: [bf16]\n", "--dtype must be one of"),
        ("dtype: bf61\n", "did you mean bf16?"),
        ("max_running: .inf\n", "--max-running must be"),
        ("drain_timeout_s: .nan\n", "--drain-timeout-s must be a number, at least 0"),
        ("port:\n", "--port must be a whole number"),
        ("- port\n", "must be a mapping"),
        ("a: [\n", "while parsing"),
        ("kv_memory: 4XB\n", "is not a size"),
        ("kv_memory: 4GB\nnum_pages: 3\n", "contradict"),
        ("max_prefill_tokens: 8\n", "less than one page"),
        ("prefill_slice: 8\n", "--prefill-slice 8 is less than one page of 16"),
        ("api_key: ''\n", "--api-key must be"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from({}, file=write(tmp_path, text), environ={})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_config_file(tmp_path / "absent.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError):
        read_config_file(binary)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert config_from({}, file=write(tmp_path, "# nothing\n"), environ={}) == Config()


def test_the_secret_is_never_in_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerOptions(api_key="s\u00e9cret")
    assert "cret" not in str(caught.value)


def test_page_size_follows_the_device_unless_given() -> None:
    assert Config().page_size == 16
    assert Config(model=ModelOptions(device="cuda")).page_size == 64
    assert Config(cache=CacheOptions(page_size=4)).page_size == 4


def test_foreign_names_mean_the_same_flag() -> None:
    parser = FlagParser(prog="x")
    for title, cls in config_groups().items():
        add_settings(parser, cls, title=title)
    words = ["--context-length", "9", "--max-num-seqs", "3", "--block-size", "8"]
    words += ["--no-enable-prefix-caching", "--dtype", "bfloat16"]
    config = config_from(given_settings(parser.parse_args(words)), environ={})
    assert config.model.max_model_len == 9
    assert config.scheduler == SchedulerOptions(max_running=3)
    assert config.cache == CacheOptions(page_size=8, prefix_cache=False)
    assert config.model.dtype == "bf16"


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4 * 10**9), ("4GiB", 4 * 2**30), ("1.5g", 3 * 2**29), (" 512 mib ", 2**29), ("7", 7)],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "1e9", "4 G B", "4PB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


@pytest.mark.parametrize("size", [1, 1023, 1024, 5 * 2**20, 3 * 2**40])
def test_a_printed_size_reads_back_to_within_a_tenth(size: int) -> None:
    assert parse_bytes(format_bytes(size).replace(" ", "")) == pytest.approx(size, rel=0.1)


def test_host_memory_is_off_unless_asked_for_or_needed_by_storage() -> None:
    assert TierOptions().host_memory_bytes == 0
    assert TierOptions(host_memory="0").host_memory_bytes == 0
    assert TierOptions(host_memory="1GB").host_memory_bytes == 10**9
    assert TierOptions(storage="/kept").host_memory_bytes is None  # the engine chooses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": "/kept", "host_memory": "0"}, "--storage needs host memory"),
        ({"storage": " "}, "must name a directory"),
        ({"host_memory": "lots"}, "'lots' is not a size"),
        ({"storage_size": "0"}, "is not a size|less than one byte"),
    ],
)
def test_tiers_that_cannot_be_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TierOptions(**options)


def test_tiers_need_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="--no-prefix-cache"):
        Config(cache=CacheOptions(prefix_cache=False), tiers=TierOptions(host_memory="1GB"))


def test_ranks_are_on_one_mesh() -> None:
    parallel = config_from({"tp": "2", "cp": "3"}, environ={}).parallel
    assert (parallel.mesh.world, parallel.mesh.tp, parallel.mesh.cp) == (6, 2, 3)
    with pytest.raises(ConfigError, match=r"--placement replicate .* --tp 2"):
        config_from({"tp": "2", "cp": "2", "placement": "replicate"}, environ={})


def test_ranks_on_gpus_share_no_memory() -> None:
    """What needs it is refused in one line, that of one rank on a GPU is not."""
    for axis in ("cp", "tp"):
        assert config_from({axis: "2", "device": "cuda"}, environ={}).ranks_apart
    assert not config_from({"cp": "2"}, environ={}).ranks_apart
    for settings, says in [
        ({"placement": "replicate"}, "--placement replicate .* do not share"),
        ({"remote_kv": "direct"}, "--remote-kv direct .* do not share"),
    ]:
        with pytest.raises(ConfigError, match=says) as refusal:
            config_from({"cp": "2", "device": "cuda", **settings}, environ={})
        assert "\n" not in str(refusal.value)
        assert not config_from({"device": "cuda", **settings}, environ={}).ranks_apart
    for axis in ("cp", "tp"):
        assert config_from(
            {axis: "2", "device": "cuda", "storage": "/kept"}, environ={}
        ).ranks_apart


@pytest.mark.parametrize(("text", "share"), [("auto", None), ("0", 0.0), ("0.5", 0.5), ("1", 1.0)])
def test_a_share_of_replicas_is_a_number_or_auto(text: str, share: float | None) -> None:
    assert ParallelOptions(hot_replicas=text).replica_share == share


@pytest.mark.parametrize("text", ["some", "-0.1", "1.5", "nan", ""])
def test_a_share_of_replicas_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="auto or a number from 0 to 1"):
        ParallelOptions(hot_replicas=text)


def test_replicas_of_what_every_rank_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        ParallelOptions(hot_replicas="0.1", placement="replicate")


@pytest.mark.parametrize(
    ("settings", "tokens", "of_a_step", "shared"),
    [
        ({}, 1024, 512, 64),
        ({"device": "cuda"}, 16384, 16384, 16384),
        ({"device": "cuda", "prefill_slice": 2048}, 16384, 2048, 2048),
        ({"page_size": 1024}, 1024, 1024, 64),
        ({"max_prefill_tokens": 3000}, 3000, 512, 64),
        ({"max_prefill_tokens": 48}, 48, 48, 48),
        ({"prefill_slice": 9000}, 1024, 1024, 64),
    ],
    ids=str,
)
def test_a_step_has_the_prompt_tokens_of_its_device_and_a_page_at_least(
    settings: dict[str, object], tokens: int, of_a_step: int, shared: int
) -> None:
    """Red if a default is refused, or what was asked for is not taken."""
    config = config_from(settings, environ={})
    got = config.max_prefill_tokens, config.prefill_slice, config.prefill_fill
    assert got == (tokens, of_a_step, shared)
