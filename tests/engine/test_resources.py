"""Limits of the machine and of cgroups, and finding models."""

from __future__ import annotations

from pathlib import Path

import pytest

from phloem.core.errors import ConfigError
from phloem.engine.facts import startup_rows
from phloem.engine.models import resolve_model
from phloem.engine.resources import available_memory_bytes, default_kv_bytes, usable_cpus
from tests.engine.fakes import build_fake, fake_config, write_model

GIB = 1 << 30


def meminfo(folder: Path, available_kib: int) -> Path:
    file = folder / "meminfo"
    file.write_text(f"MemTotal: 1 kB\nMemAvailable:   {available_kib} kB\n")
    return file


def test_the_tighter_of_machine_and_cgroup_counts(tmp_path: Path) -> None:
    machine = meminfo(tmp_path, 8 * GIB // 1024)
    assert available_memory_bytes(meminfo=machine, cgroup_root=tmp_path) == 8 * GIB
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
    assert available_memory_bytes(meminfo=machine, cgroup_root=tmp_path) == 2 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(meminfo=machine, cgroup_root=tmp_path) == 8 * GIB


def test_nothing_known(tmp_path: Path) -> None:
    assert available_memory_bytes(meminfo=tmp_path / "no", cgroup_root=tmp_path) is None
    assert default_kv_bytes(None) == GIB


def test_default_kv_memory_is_a_quarter_and_at_most_4_gib() -> None:
    assert default_kv_bytes(8 * GIB) == 2 * GIB
    assert default_kv_bytes(100 * GIB) == 4 * GIB


def test_cpu_quota_limits_threads(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert usable_cpus(cgroup_root=tmp_path) == 1
    (tmp_path / "cpu.max").write_text("50000 100000\n")  # half a CPU is still one thread
    assert usable_cpus(cgroup_root=tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cpus(cgroup_root=tmp_path) >= 1


def test_models_by_folder_and_file(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "my-model")
    assert resolve_model(str(folder)).name == "my-model"
    file = tmp_path / "tiny.Q4_0.gguf"
    file.write_bytes(b"GGUF")
    found = resolve_model(str(file))
    assert (found.name, found.is_gguf) == ("tiny.Q4_0", True)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "no model given"),
        ("gpt-5", "no such model: 'gpt-5'"),
        ("meta-llama/Llama-3", "does not download"),
        ("EMPTY", "no config.json"),
        ("FILE", "no .gguf file"),
    ],
)
def test_what_is_no_model_is_a_config_error(tmp_path: Path, name: str, complaint: str) -> None:
    (tmp_path / "FILE").write_text("x")
    (tmp_path / "EMPTY").mkdir()
    model = str(tmp_path / name) if name in ("EMPTY", "FILE") else name
    with pytest.raises(ConfigError, match=complaint):
        resolve_model(model)


class _Quiet:
    def emit(self, chunks: object) -> None: ...

    def on_layer(self) -> None: ...

    def on_wait(self) -> None: ...

    def wake(self) -> None: ...

    def on_load(self, done: int, total: int, phase: str) -> None: ...


def test_startup_table_says_what_was_loaded(tmp_path: Path) -> None:
    core = build_fake(fake_config(tmp_path, num_pages=100), _Quiet(), ())
    rows = dict(startup_rows(core.facts))
    assert rows["pages"] == "100"
    assert rows["token capacity"] == "400"
    assert rows["KV memory"] == "100.0 KiB"
