"""The native library for tests: built from the checkout, at most once per run."""

from __future__ import annotations

import functools
import os
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
