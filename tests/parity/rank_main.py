"""The ranks of `processes.load_process_ranks`, each in a process of its own: freed pages are NaN,
the copy of the cache is compared in every step, and the core is given away at random."""

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


def serve(seat: RankSeat, wire: int, args: argparse.Namespace) -> int:
    """Until the wire closes; the exit status."""
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
    replica = RecordReader(state)
    failure = Follower(
        seat.progress.rank, Wire(socket.socket(fileno=wire)), loaded, replica
    ).serve()
    if failure is not None:
        print(f"rank {seat.progress.rank}: {failure}", file=sys.stderr, flush=True)
    return 0 if failure is None else 1


def take_one(seats: dict[int, RankSeat]) -> tuple[tuple[int, RankSeat], list[int]]:
    """Fork until every process has one of the seats, by wire; also what this process has forked.

    What all import is loaded once; the others' descriptors are given back.
    """
    children = []
    for wire, seat in list(seats.items())[1:]:
        child = os.fork()
        if not child:
            for other in seats.keys() - {wire}:
                os.close(other)
                seats[other].close()
            return (wire, seat), []
        children.append(child)
        os.close(wire)
        seat.close()
        del seats[wire]
    ((wire, seat),) = seats.items()
    return (wire, seat), children


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seats")
    parser.add_argument("--path")
    parser.add_argument("--options")
    parser.add_argument("--host-pages", type=int)
    args = parser.parse_args()
    by_wire = {int(wire): RankSeat.from_json(seat) for wire, seat in json.loads(args.seats).items()}
    (own, place), forked = take_one(by_wire)
    status = serve(place, own, args)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in forked]
    os._exit(max([status, *map(abs, ends)]))
