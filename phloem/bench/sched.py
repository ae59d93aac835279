"""What a step costs in the scheduler, in Python, with a long queue.

Timed are `plan` and `apply` of one step, nothing else: the worker computes nothing, and sending
new requests is not part of a step. 64 requests decode, prompts of 200 to 1,200 tokens share heads
of 0 to 512 tokens, pages of 16.

    step_1000_queued_us            1,000 wait; a row becomes free now and then, requests end and
                                   start, so matches and order change: the steady state
    step_1000_queued_no_room_us    1,000 wait, rows are free but pages are not: every pass looks
                                   for one that fits
    step_10_queued_us              the first with 10 waiting: what the queue's length costs
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from phloem.cache import PrefixCache
from phloem.core.clock import VirtualClock
from phloem.core.namespace import make_namespace
from phloem.core.request import GenerateRequest, SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.sched import Scheduler, SchedulerConfig
from phloem.sim import CostWorker

__all__ = ["run"]

PAGE_SIZE = 16
NUM_RUNNING = 64
VOCAB_SIZE = 32_000


def run(quick: bool = False) -> dict[str, Any]:
    """Medians in microseconds, with all samples."""
    steps = 100 if quick else 1000
    churn = {"max_running": NUM_RUNNING, "num_pages": 12_000, "max_tokens": (16, 96)}
    no_room = {"max_running": 2 * NUM_RUNNING, "num_pages": 3_000, "max_tokens": (600, 600)}
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("step_1000_queued_us", 1000, churn),
        ("step_1000_queued_no_room_us", 1000, no_room),
        ("step_10_queued_us", 10, churn),
    ]
    results = []
    for name, queued, settings in cases:
        samples = _Steady(queued=queued, **settings).measure(steps)
        value = round(statistics.median(samples), 1)
        results.append({"name": name, "value": value, "unit": "us", "samples": samples})
    return {"bench": "sched", "results": results}


class _Steady:
    """A scheduler kept under constant load."""

    def __init__(
        self, *, queued: int, max_running: int, num_pages: int, max_tokens: tuple[int, int]
    ) -> None:
        self._rng = random.Random(1)
        self._queued = queued
        self._max_tokens = max_tokens
        cache = PrefixCache(page_size=PAGE_SIZE, num_pages=(num_pages,))
        config = SchedulerConfig(max_model_len=8192, max_running=max_running)
        self._scheduler = Scheduler(config, cache)
        self._worker = CostWorker(VirtualClock())
        self._heads = [self._ids(length) for length in (0, 64, 128, 256, 512) for _ in range(8)]
        self._sent = 0

    def measure(self, steps: int) -> list[float]:
        """Microseconds of plan + apply for each of `steps` steps, after a warm-up."""
        self._refill()
        for _ in range(150):
            self._step()
            self._refill()
        samples = []
        for _ in range(steps):
            samples.append(round(self._step() * 1e6, 1))
            self._refill()
        return samples

    def _step(self) -> float:
        """One step with the one before in flight, as in the loop; returns its seconds."""
        start_s = time.perf_counter()
        plan = self._scheduler.plan()
        spent_s = time.perf_counter() - start_s
        if plan is not None:
            self._worker.submit(plan)
        if self._scheduler.num_in_flight > 1 or plan is None:
            result = self._worker.collect()
            start_s = time.perf_counter()
            self._scheduler.apply(result)
            spent_s += time.perf_counter() - start_s
        return spent_s

    def _refill(self) -> None:
        missing = self._queued - self._scheduler.num_queued
        for _ in range(missing):
            self._sent += 1
            tail = self._ids(self._rng.randrange(200, 700))
            request = GenerateRequest(
                request_id=str(self._sent),
                tokens=self._rng.choice(self._heads) + tail,
                sampling=SamplingParams(
                    max_tokens=self._rng.randint(*self._max_tokens), ignore_eos=True
                ),
                namespace=make_namespace(model="bench"),
            )
            self._scheduler.add(request)

    def _ids(self, count: int) -> bytes:
        return tokens_to_bytes([self._rng.randrange(VOCAB_SIZE) for _ in range(count)])
