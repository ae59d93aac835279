"""What dividing the pages costs in time: ranks of one thread each, engines that take turns.

All sides run the same code over random weights of SmolLM2-135M's shape, with NUM_LAYERS of its 30
layers, so that some tens of pairs of 16K prompts fit into minutes: all layers are alike. Decoding
takes all 30, since a step's fixed costs are what is in question there.

    direct_cost_bound_*            striped over replicated, prefill: the 95 % bound of the median
    aa_control                     one and the same engine over itself: the bound of what is no cost
    prefill_speedup_cp2_over_...   how much faster two ranks are than one, over how much more two
                                   independent processes get done than one
    decode_cp2_over_one            a step of one request on two ranks, over one rank's
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from phloem.bench.cp_engines import (
    BenchEngine,
    EngineShape,
    open_engines,
    random_prompt,
    write_random_model,
)
from phloem.bench.paired import Quad, median_interval, quad
from phloem.bench.report import Result

__all__ = ["CpPlan", "measure_time"]

NUM_LAYERS = 2
STRIPED = EngineShape(cp=2, placement="striped")
REPLICATED = EngineShape(cp=2, placement="replicate")
ONE = EngineShape(num_pages=1400)
DECODE_CONTEXT, DECODE_TOKENS = 512, 32


class CpPlan:
    """How often each comparison is made; a quad is two turns of each side."""

    def __init__(self, *, quick: bool) -> None:
        self.lengths = (2048,) if quick else (8192, 16384)
        self.quads = 3 if quick else 15  # of two pairs each
        self.rounds = 2 if quick else 8


def measure_time(*, quick: bool = False) -> list[Result]:
    """All figures of this file, in about a quarter of an hour (quick: a minute or two)."""
    plan = CpPlan(quick=quick)
    with tempfile.TemporaryDirectory(prefix="phloem-cp-") as folder:
        few = write_random_model(Path(folder, "few"), num_layers=NUM_LAYERS)
        results = _costs(few, plan)
        results.append(_speedup(few, plan))
        many = write_random_model(Path(folder, "many"), num_layers=30)
        results.append(_decode(many, plan))
    return results


def _costs(model: Path, plan: CpPlan) -> list[Result]:
    results: list[Result] = []
    control: list[Quad] = []
    with open_engines(model, STRIPED, REPLICATED) as (striped, replicated):
        for length in plan.lengths:
            turns = _Turns(length)
            quads = [
                quad(turns.of(replicated), turns.of(striped), turn) for turn in range(plan.quads)
            ]
            if not control:  # of the shortest prompts
                mine = turns.of(striped)
                control = [quad(mine, mine, turn) for turn in range(plan.quads)]
            costs = _costs_of(quads)
            _, high = median_interval(costs)
            name = f"direct_cost_bound_{length // 1024}k"
            results.append(
                Result(
                    name=name,
                    value=round(high, 4),
                    unit="ratio",
                    samples=[round(cost, 4) for cost in costs],
                )
            )
            results.append(
                Result(
                    name=f"direct_cost_{length // 1024}k",
                    value=round(statistics.median(costs), 4),
                    unit="ratio",
                )
            )
    costs = _costs_of(control)
    bound = max(map(abs, median_interval(costs)))
    results.append(Result(name="aa_control", value=round(bound, 4), unit="ratio"))
    return results


def _costs_of(quads: Sequence[Quad]) -> list[float]:
    """How much longer mine takes, as a fraction."""
    return [each.mine_s / each.other_s - 1 for each in quads]


class _Turns:
    """Prompts of one length, each new to every cache."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._rng = random.Random(length)

    def of(self, engine: BenchEngine) -> _Turn:
        return _Turn(engine, self._rng, self._length)


class _Turn:
    """One prefill, with an empty cache."""

    def __init__(self, engine: BenchEngine, rng: random.Random, length: int) -> None:
        self._engine, self._rng, self._length = engine, rng, length

    def __call__(self) -> None:
        self._engine.forget()
        self._engine.answer(random_prompt(self._rng, self._length))


def _speedup(model: Path, plan: CpPlan) -> Result:
    """Two ranks over one, against two independent processes over one; turn by turn."""
    length = plan.lengths[0]
    rng = random.Random(1)
    shares = []
    with (
        open_engines(model, STRIPED, ONE) as (two_ranks, one_rank),
        _Alone(model) as first,
        _Alone(model) as second,
    ):
        for _ in range(plan.rounds):
            one_s = _prefill(one_rank, rng, length)
            ranks_s = _prefill(two_ranks, rng, length)
            alone_s = first.prefill(length)
            both_s = _together(first, second, length)
            shares.append((one_s / ranks_s) / (2 * alone_s / both_s))
    return Result(
        name="prefill_speedup_cp2_over_machine",
        value=round(statistics.median(shares), 4),
        unit="ratio",
        samples=[round(share, 4) for share in shares],
    )


def _prefill(engine: BenchEngine, rng: random.Random, length: int) -> float:
    engine.forget()
    return engine.answer(random_prompt(rng, length))


class _Alone:
    """A process with an engine of one rank and one thread."""

    def __init__(self, model: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve_alone, args=(model, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> _Alone:
        self.prefill(256)
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()

    def begin(self, length: int) -> None:
        self._pipe.send(length)

    def end(self) -> float:
        took: float = self._pipe.recv()
        return took

    def prefill(self, length: int) -> float:
        """Seconds of one prefill."""
        self.begin(length)
        return self.end()


def _serve_alone(model: Path, pipe: Connection) -> None:
    rng = random.Random(id(pipe))
    with open_engines(model, ONE) as (engine,):
        while True:
            try:
                length = pipe.recv()
            except EOFError:
                return
            pipe.send(_prefill(engine, rng, length))


def _together(first: _Alone, second: _Alone, length: int) -> float:
    """Seconds until both have done one prefill each."""
    started = time.perf_counter()
    first.begin(length)
    second.begin(length)
    first.end()
    second.end()
    return time.perf_counter() - started


def _decode(model: Path, plan: CpPlan) -> Result:
    """Seconds of DECODE_TOKENS steps, of which the prefill is taken off."""
    rng = random.Random(2)
    ratios = []
    with open_engines(model, STRIPED, ONE) as engines:
        for turn in range(2 * plan.rounds):
            prompt = random_prompt(rng, DECODE_CONTEXT)
            order = engines if turn % 2 else engines[::-1]
            took = {id(engine): _decode_seconds(engine, prompt) for engine in order}
            two_ranks, one_rank = (took[id(engine)] for engine in engines)
            ratios.append(two_ranks / one_rank)
    return Result(
        name="decode_cp2_over_one",
        value=round(statistics.median(ratios), 4),
        unit="ratio",
        samples=[round(ratio, 4) for ratio in ratios],
    )


def _decode_seconds(engine: BenchEngine, prompt: list[int]) -> float:
    engine.forget()
    engine.answer(prompt, 1)
    first = engine.answer(prompt, 1)  # all but the last page is cached
    return engine.answer(prompt, 1 + DECODE_TOKENS) - first
