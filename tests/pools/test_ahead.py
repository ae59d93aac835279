"""Memory that is populated ahead."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import numpy as np
import pytest

from phloem.pools import ahead


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def has_populate() -> bool:
    numbers = platform.release().split(".")[:2]
    return sys.platform == "linux" and tuple(map(int, numbers)) >= (5, 14)


@pytest.mark.skipif(not has_populate(), reason="MADV_POPULATE_WRITE is of Linux 5.14")
def test_the_first_bytes_become_resident_and_keep_what_is_in_them(monkeypatch):
    monkeypatch.setattr(ahead, "MOST_BYTES", 64 << 20)
    memory = np.zeros(256 << 20, dtype=np.uint8)
    memory[12345] = 7
    before = resident_kib()
    thread = ahead.populate(memory)
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
    assert 48 << 10 <= resident_kib() - before <= 80 << 10
    assert memory[12345] == 7
    assert int(memory[: 64 << 20].sum()) == 7


def test_little_memory_is_left_alone():
    assert ahead.populate(np.zeros(1 << 20, dtype=np.uint8)) is None
