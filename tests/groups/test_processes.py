"""ShmGroup among real processes."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

from phloem.groups import shm_seats

ROOT = Path(__file__).resolve().parents[2]


def test_processes_exchange_and_see_at_once_that_one_was_killed() -> None:
    """200 seeded operations, then kill -9: red if bytes differ, or if the end is a time-out."""
    ranks = []
    for seat in shm_seats(2, timeout_s=100, chunk_bytes=1024):
        command = [sys.executable, "-m", "tests.groups.rank_main"]
        command.append(json.dumps(dataclasses.asdict(seat)))
        ranks.append(
            subprocess.Popen(
                command, cwd=ROOT, pass_fds=seat.fds, stdout=subprocess.PIPE, text=True
            )
        )
        seat.close()
    try:
        words = [rank.communicate(timeout=100)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL]
    assert words[0][0] == words[1][0]
    assert words[0][1].startswith("(1,) rank 1 of cp is gone: barrier")
