"""The native library for tests: built from the checkout, at most once per run."""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(folder: str, *options: str) -> Path:
    """Configure and build csrc into build/<folder>; skips the test where there are no tools."""
    if shutil.which("cmake") is None or not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("building the native kernels needs cmake and a C++ compiler")
    where = ROOT / "build" / folder
    where.mkdir(parents=True, exist_ok=True)
    with (where / ".lock").open("w") as lock:  # test workers are processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            ["cmake", "-S", str(ROOT / "csrc"), "-B", str(where), *options],
            ["cmake", "--build", str(where), "-j", "2"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return where


@functools.cache
def native_library() -> Path:
    """The library of this checkout (or the one that PHLOEM_CPU_LIBRARY names)."""
    override = os.environ.get("PHLOEM_CPU_LIBRARY")
    if override:
        return Path(override)
    return build("csrc", "-DCMAKE_BUILD_TYPE=Release") / "libphloem_cpu.so"


@functools.cache
def emulated_build() -> Path:
    """The build with AMX and AVX512-BF16 on emulated instructions; skips where that cannot run."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the emulated instructions need an x86-64 processor")
    where = build("csrc-emulated", "-DCMAKE_BUILD_TYPE=Release", "-DPHLOEM_EMULATE=ON")
    if "avx2" not in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split():
        pytest.skip("the emulated instructions need AVX2")
    return where


def emulated_library() -> Path:
    return emulated_build() / "libphloem_cpu_emulated.so"
