"""Paths that no machine here has are taken only after a self-test: right, wrong, crashed, hung."""

from __future__ import annotations

import json
import logging

import pytest

from phloem.kernels import native_abi, native_proof
from phloem.kernels.native import CpuIsa, NativeKernels
from phloem.kernels.native_proof import Finding, Verdict, examine, finding_of, verdicts_path
from tests.kernels.native_build import emulated_library, native_library

FAULT = "PHLOEM_EMULATED_FAULT"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(FAULT, raising=False)
    monkeypatch.delenv("PHLOEM_CPU_ISA", raising=False)
    yield
    native_proof.trusted.cache_clear()


@pytest.fixture
def processor_with_tiles(monkeypatch):
    """A processor that has everything but AVX-512 without bf16, emulated."""
    path = emulated_library()
    monkeypatch.setenv("PHLOEM_CPU_LIBRARY", str(path))
    native_abi.library.cache_clear()
    yield path
    native_abi.library.cache_clear()


def isa_that_auto_takes() -> CpuIsa:
    """In a new process."""
    native_proof.trusted.cache_clear()
    kernels = NativeKernels(threads=1)
    isa = kernels.isa
    kernels.close()
    return isa


@pytest.mark.parametrize("isa", [CpuIsa.AMX, CpuIsa.AVX512BF16], ids=lambda isa: isa.value)
@pytest.mark.parametrize(
    ("fault", "verdict", "detail"),
    [
        ("crash", Verdict.CRASHED, "SIGILL"),
        ("wrong", Verdict.WRONG, "product (1, 48, 64)"),
        ("hang", Verdict.HUNG, "no answer in 3 s"),
        ("none", Verdict.RIGHT, ""),
    ],
)
def test_a_self_test_says_what_a_path_is(monkeypatch, isa, fault, verdict, detail):
    monkeypatch.setenv(FAULT, f"{isa.value}={fault}")
    timeout_s = 3.0 if verdict is Verdict.HUNG else native_proof.TIMEOUT_S
    finding = examine(isa, emulated_library(), timeout_s=timeout_s)
    assert finding.verdict is verdict, finding
    assert detail in finding.detail


def test_a_path_that_the_processor_lacks_is_refused_and_asked_again():
    finding = finding_of(CpuIsa.AVX512, emulated_library())
    assert finding.verdict is Verdict.REFUSED
    assert not verdicts_path().exists()


def test_a_library_that_answers_nothing_has_proven_nothing(monkeypatch, tmp_path):
    """Ending the process with success is not the word."""
    monkeypatch.setattr(native_proof, "_CHILD", "raise SystemExit(0)")
    assert examine(CpuIsa.AMX, tmp_path / "none.so").verdict is Verdict.CRASHED


def test_a_library_that_cannot_be_loaded_is_no_pass(tmp_path):
    assert examine(CpuIsa.AMX, tmp_path / "none.so").verdict is Verdict.CRASHED


@pytest.mark.parametrize(
    ("faults", "taken", "warned"),
    [
        ("", CpuIsa.AMX, []),
        ("amx=crash", CpuIsa.AVX512BF16, ["amx"]),
        ("amx=wrong,avx512bf16=crash", CpuIsa.AVX2, ["amx", "avx512bf16"]),
    ],
)
def test_auto_falls_to_the_next_path(
    monkeypatch, caplog, processor_with_tiles, faults, taken, warned
):
    """One line for each path that fails, none for those that were not tried."""
    monkeypatch.setenv(FAULT, faults)
    with caplog.at_level(logging.WARNING, logger=native_proof.logger.name):
        assert isa_that_auto_takes() is taken
        NativeKernels(threads=1).close()  # a second context of the process asks and warns no more
    assert [record.getMessage().split()[2] for record in caplog.records] == warned


def test_a_verdict_is_remembered_for_this_machine(monkeypatch, processor_with_tiles):
    """A second process runs no self-test; another processor does."""
    assert isa_that_auto_takes() is CpuIsa.AMX

    def no_test(*_args, **_kwargs):
        raise AssertionError("tested again")

    monkeypatch.setattr(native_proof, "examine", no_test)
    assert isa_that_auto_takes() is CpuIsa.AMX
    monkeypatch.setattr(native_proof, "_cpu_model", lambda: "another")
    with pytest.raises(AssertionError, match="tested again"):
        isa_that_auto_takes()


def test_a_bad_verdict_is_remembered_and_others_are_kept(monkeypatch, processor_with_tiles):
    monkeypatch.setenv(FAULT, "amx=wrong")
    assert isa_that_auto_takes() is CpuIsa.AVX512BF16
    monkeypatch.delenv(FAULT)
    assert isa_that_auto_takes() is CpuIsa.AVX512BF16
    (entries,) = json.loads(verdicts_path().read_text()).values()
    assert {isa: entry["verdict"] for isa, entry in entries.items()} == {
        "amx": "wrong",
        "avx512bf16": "right",
    }


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": {"amx": {"verdict": "maybe"}}}'])
def test_a_file_that_is_not_understood_is_as_none(processor_with_tiles, text):
    verdicts_path().parent.mkdir(parents=True)
    verdicts_path().write_text(text)
    assert isa_that_auto_takes() is CpuIsa.AMX
    assert '"amx"' in verdicts_path().read_text()


def test_where_nothing_can_be_written_auto_still_chooses(processor_with_tiles):
    verdicts_path().parent.parent.mkdir(parents=True)
    verdicts_path().parent.write_text("a file where a folder should be")
    assert isa_that_auto_takes() is CpuIsa.AMX


def test_old_machines_are_forgotten(monkeypatch, tmp_path):
    library = tmp_path / "library.so"
    monkeypatch.setattr(
        native_proof, "examine", lambda *_args, **_kwargs: Finding(verdict=Verdict.RIGHT)
    )
    for version in range(native_proof.KEPT_MACHINES + 3):
        library.write_text(str(version))
        finding_of(CpuIsa.AMX, library)
    assert len(json.loads(verdicts_path().read_text())) == native_proof.KEPT_MACHINES


def test_no_child_is_started_where_the_processor_has_none_of_them(monkeypatch):
    """On this machine `auto` costs nothing: the library says so before anything is tested."""
    native_library()
    lib = native_abi.library()
    if any(lib.phloem_isa_supported(native_abi.ISA_NUMBERS[isa]) for isa in native_proof.UNPROVEN):
        pytest.skip("this processor has AVX-512")
    monkeypatch.setattr(native_proof, "examine", lambda *_args, **_kwargs: pytest.fail("tested"))
    assert isa_that_auto_takes() in {CpuIsa.PLAIN, CpuIsa.AVX2}
