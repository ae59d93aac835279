"""Ranks in processes of their own under the parity rig, rank 0 among the test's threads."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from phloem.config.checkpoint import read_model_config
from phloem.core.mesh import Mesh
from phloem.engine.rank_seats import rank_seats, size_memory
from phloem.worker import (
    LoadedWorker,
    RankedWorker,
    Wire,
    WorkerOptions,
    kv_specs,
    load_worker,
    pool_layouts,
)
from phloem.worker.load import kv_dtype_of

__all__ = ["load_process_ranks"]

ROOT = Path(__file__).resolve().parents[2]
# What a rank is told; the rest is the leader's.
TOLD = ("dtype", "kv_dtype", "page_size", "num_pages", "max_running", "max_model_len", "threads")


def load_process_ranks(
    path: Path,
    options: WorkerOptions,
    mesh: Mesh,
    children: list[subprocess.Popen[bytes]],
) -> LoadedWorker:
    """As `load_local_ranks`, for models without windows. The process that waits for all the others
    is added to `children`; they end when the worker is closed."""
    assert options.num_pages is not None
    specs = kv_specs(
        read_model_config(path), dtype=kv_dtype_of(options), page_size=options.page_size
    )
    seats = rank_seats(specs[0].shard_axis(mesh), 1)
    size_memory(seats[0], pool_layouts(specs, [options.num_pages]), options.max_running)
    told = {name: getattr(options, name) for name in (*TOLD, "kernels")}
    wires, passed = [], {}
    for seat in seats[1:]:
        ours, theirs = socket.socketpair()
        passed[theirs.detach()] = seat
        wires.append(Wire(ours))
    command = [sys.executable, "-m", "tests.parity.rank_main", "--path", str(path)]
    command += ["--seats", json.dumps({wire: seat.to_json() for wire, seat in passed.items()})]
    command += ["--options", json.dumps(told), "--host-pages", str(options.host_pages)]
    fds = [*passed, *(fd for seat in passed.values() for fd in seat.fds)]
    children.append(subprocess.Popen(command, cwd=ROOT, pass_fds=fds))
    for wire, seat in passed.items():
        os.close(wire)
        seat.close()
    loaded = load_worker(path, options, place=seats[0].take())
    assert not isinstance(loaded.worker, RankedWorker)
    return replace(loaded, worker=RankedWorker(loaded.worker, wires))
