"""What the log costs: packing and sending a record at the leader, applying it at a follower.

64 requests decode on 4 ranks, with the real scheduler, cache and placement; the ranks are at the
other ends of socket pairs, and read as real ones do. Times are of the leader's thread, and of the
follower's work on one record: decode it, apply its commands.
"""

from __future__ import annotations

import random
import socket
import statistics
import threading
import time
from collections.abc import Sequence

from phloem.bench.report import Result
from phloem.cache import PrefixCache
from phloem.cache.state import CacheState
from phloem.core.clock import VirtualClock
from phloem.core.namespace import make_namespace
from phloem.core.plan import StepPlan
from phloem.core.request import GenerateRequest, OutputChunk, SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.loop import EngineLoop
from phloem.replica import RecordReader, RecordWriter
from phloem.sched import Scheduler, SchedulerConfig
from phloem.sim import CostWorker
from phloem.worker import Step, Wire, packed

__all__ = ["measure_control"]

NUM_RANKS, NUM_RUNNING = 4, 64
PAGE_SIZE, PAGES = 16, 1024  # of each rank
PROMPT_TOKENS, ANSWER_TOKENS = 256, 300
WARM_UP = 20  # steps that are not counted


class _Leader(CostWorker):
    """A worker that computes nothing, but sends every plan to the other ranks."""

    def __init__(self, clock: VirtualClock, wires: Sequence[Wire]) -> None:
        super().__init__(clock)
        self._wires = wires
        self.log: RecordWriter | None = None
        self.added_s: list[float] = []
        self.records: list[bytes] = []

    def submit(self, plan: StepPlan) -> None:
        assert self.log is not None, "joined before the first step"
        started = time.perf_counter()
        frame = packed(Step(plan, *self.log.take()))
        for wire in self._wires:
            wire.send(frame)
        self.added_s.append(time.perf_counter() - started)
        self.records.append(frame)
        super().submit(plan)


def measure_control() -> list[Result]:
    """Microseconds of the median step."""
    pairs = [socket.socketpair() for _ in range(NUM_RANKS - 1)]
    wires = [Wire(ours) for ours, _ in pairs]
    readers = [threading.Thread(target=_drain, args=(theirs,)) for _, theirs in pairs]
    for reader in readers:
        reader.start()
    leader = _Leader(VirtualClock(), wires)
    try:
        _run(leader)
    finally:
        for wire in wires:
            wire.shut()
            wire.close()
        for reader in readers:
            reader.join()
    applied = _apply(leader.records)
    return [
        _result("follower_apply_us", applied[WARM_UP:]),
        _result("leader_added_us_4_ranks", leader.added_s[WARM_UP:]),
    ]


def _result(name: str, seconds: Sequence[float]) -> Result:
    samples = sorted(each * 1e6 for each in seconds)
    spread = (samples[len(samples) // 10], samples[len(samples) * 9 // 10])
    return Result(
        name=name,
        value=round(statistics.median(samples), 1),
        unit="us",
        spread=(round(spread[0], 1), round(spread[1], 1)),
    )


def _run(leader: _Leader) -> None:
    cache = PrefixCache(page_size=PAGE_SIZE, num_pages=(PAGES,) * NUM_RANKS)
    leader.log = RecordWriter(cache.leader.log, cache.state, digest_every=1 << 30)
    config = SchedulerConfig(
        max_model_len=1024,
        max_running=NUM_RUNNING,
        max_queued=NUM_RUNNING,
        max_prefill_tokens=NUM_RUNNING * PROMPT_TOKENS,
        policy="fcfs",
        overlap=True,
        eos_ids=(),
        seed=0,
    )
    loop = EngineLoop(Scheduler(config, cache), leader, VirtualClock(), _nobody_reads)
    rng = random.Random(0)
    for number in range(NUM_RUNNING):
        prompt = [rng.randrange(1000) for _ in range(PROMPT_TOKENS)]
        loop.add(
            GenerateRequest(
                request_id=str(number),
                tokens=tokens_to_bytes(prompt),
                sampling=SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True),
                namespace=make_namespace(model="bench"),
            )
        )
    loop.run_until_idle()


def _apply(records: Sequence[bytes]) -> list[float]:
    """Seconds of each record at one follower, from the wire to the state."""
    ours, theirs = socket.socketpair()
    reader = RecordReader(CacheState(PAGE_SIZE, (PAGES,) * NUM_RANKS))
    took = []
    with ours, theirs:
        wire = Wire(theirs)
        messages = wire.down()
        for record in records:
            ours.sendall(record)
            started = time.perf_counter()
            message = next(messages)
            assert isinstance(message, Step), "nothing else was sent"
            reader.apply(message.log)
            took.append(time.perf_counter() - started)
    return took


def _drain(sock: socket.socket) -> None:
    with sock:
        while sock.recv(1 << 16):
            pass


def _nobody_reads(chunks: Sequence[OutputChunk]) -> None:
    """The answers are of no interest."""
