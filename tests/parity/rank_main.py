"""A rank of `processes.load_process_ranks`, in a process of its own: freed pages are NaN, the copy
of the cache is compared in every step, and the scheduler is given the core at random."""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import sys
from pathlib import Path

import pytest

from phloem.cache.state import CacheState
from phloem.engine.rank_seats import RankSeat
from phloem.replica import RecordReader
from phloem.worker import Follower, Hooks, InlineWorker, Wire, WorkerOptions, load_worker
from tests.parity.exact import sum_row_by_row

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int)
    parser.add_argument("--seat")
    parser.add_argument("--path")
    parser.add_argument("--options")
    parser.add_argument("--host-pages", type=int)
    args = parser.parse_args()
    seat = RankSeat.from_json(args.seat)
    rng = random.Random(seat.progress.rank)

    def jitter() -> None:
        for _ in range(rng.choice((0, 0, 1, 50, 400))):
            os.sched_yield()

    # All ranks of a row compute the logits that rank 0 tells.
    capture = None if seat.axis.mesh.cp_index(seat.progress.rank) else lambda *_: None
    hooks = Hooks(on_layer=jitter, nan_fill=True, capture_logits=capture)
    options = WorkerOptions(hooks=hooks, inline=True, **json.loads(args.options))
    loaded = load_worker(Path(args.path), options, place=seat.take())
    assert isinstance(loaded.worker, InlineWorker)
    if options.kernels == "reference":  # as `exact.sum_row_by_row` asks for in the test's process
        sum_row_by_row(pytest.MonkeyPatch())
    pages = (loaded.num_pages[0],) * seat.axis.size
    state = CacheState(options.page_size, pages, host_pages=args.host_pages)
    wire = Wire(socket.socket(fileno=args.socket))
    failure = Follower(seat.progress.rank, wire, loaded, RecordReader(state)).serve()
    if failure is not None:
        print(f"rank {seat.progress.rank}: {failure}", file=sys.stderr, flush=True)
    os._exit(0 if failure is None else 1)
