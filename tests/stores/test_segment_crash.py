"""The segment store against kill -9 and against neighbours (in processes of their own)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

POINTS = 200


def drive(*args: object) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.stores.driver", *map(str, args)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    result["complaints"] = len(done.stderr.splitlines())
    assert not result["failed"], done.stderr
    return result


@pytest.mark.timeout(180)
def test_killed_at_200_points_it_never_serves_a_wrong_page(tmp_path: Path) -> None:
    """No wrong page; what is offered is there; what was acknowledged is there, what was dropped
    is not; bound respected."""
    result = drive("kill", tmp_path / "store", 20_26, POINTS)
    assert result["points"] == POINTS
    assert result["killed"] >= 0.975 * POINTS
    assert result["offered"] > 25 * POINTS
    assert result["promised"] > 2.5 * POINTS
    assert result["dropped"] > 2.5 * POINTS


def test_three_processes_share_one_directory(tmp_path: Path) -> None:
    """All write and read at once: right pages only, also each other's; one bound for all."""
    result = drive("share", tmp_path / "store", 7, 3, 2.0)
    assert result["fewest_foreign_reads"] > 20
