"""The kernels under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import subprocess

import pytest

from tests.kernels.native_build import build


@pytest.mark.long
@pytest.mark.timeout(600)
def test_driver_is_clean_under_sanitizers():
    """csrc/tests/driver.cpp: exact-size buffers, NaN in unread pages, every instruction set."""
    where = build("csrc-asan", "-DPHLOEM_SANITIZE=ON")
    done = subprocess.run(
        [str(where / "phloem_cpu_test")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout
