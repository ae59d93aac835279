"""Time to first token of a cached prefix, by the tier it comes from, in this process.

    device   the pages are there              host      they were demoted
    storage  host and device have forgotten them; files are read past the page cache (O_DIRECT)
    cold     no tier has seen the prompt

Each sample is one request of the whole engine: prefix and some new tokens, one token back. The
contestants of a pair take turns in going first, and never run at the same time.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from phloem.bench.core_hooks import KeptChunks
from phloem.config import CacheOptions, Config, ModelOptions, TierOptions
from phloem.core.namespace import make_namespace
from phloem.core.request import CachedTokens, GenerateRequest, SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.engine.loop_core import LoopCore
from phloem.tiers import Forced

__all__ = ["TtftOptions", "TtftRig", "measure_ttft", "upper_bound"]

NEW_TOKENS = 32
PAGE_SIZE = 16
_NAMESPACE = make_namespace(model="bench")
_RESAMPLES = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftOptions:
    """Sizes. `lengths` for the comparison with the best way, `cached` for the two ratios."""

    model: str = "smollm2"
    cached: int = 4096
    lengths: tuple[int, ...] = (256, 1024, 4096, 8000)
    pairs: int = 30
    cold_samples: int = 3


class TtftRig:
    """One engine without its processes. `forget_*` do what eviction would."""

    def __init__(self, core: LoopCore, hooks: KeptChunks) -> None:
        self._core, self._hooks = core, hooks
        self._cache = core.loop.scheduler.cache
        self._rng = random.Random("ttft")
        self._serial = 0

    def force(self, way: Forced | None) -> None:
        """From now on always load, always recompute, or (None) as the engine chooses."""
        tiers = self._core.loop.scheduler.tiers
        assert tiers is not None, "the rig has tiers"
        tiers.cost.forced = way

    def fresh(self, count: int) -> list[int]:
        """Tokens that no one has sent before."""
        vocab = self._core.facts.card.vocab_size
        return [self._rng.randrange(min(1_000, vocab // 4), vocab) for _ in range(count)]

    def ask(self, prompt: list[int]) -> tuple[float, CachedTokens]:
        """Seconds to the first token, and where the prompt came from."""
        self._serial += 1
        request = GenerateRequest(
            request_id=str(self._serial),
            tokens=tokens_to_bytes(prompt),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            namespace=_NAMESPACE,
        )
        self._hooks.chunks.clear()
        started = time.perf_counter()
        self._core.add(request)
        while not self._hooks.chunks:
            self._core.step()
        seconds = time.perf_counter() - started
        (chunk,) = self._hooks.chunks
        assert chunk.error is None, chunk.error
        self.settle()
        return seconds, chunk.cached

    def settle(self) -> None:
        """Let all transfers end."""
        while self._core.step():
            pass

    def forget_device(self) -> None:
        """Every cached page leaves the device; copied ones stay on the host."""
        self._cache.evict(self._cache.evictable_pages)

    def forget_host(self) -> None:
        """Device and host forget; storage keeps."""
        self.forget_device()
        host = self._cache.leader.host
        host.evict(host.capacity)


def _say_nothing(line: str) -> None:
    """Nobody watches."""


def measure_ttft(
    options: TtftOptions, say: Callable[[str], None] = _say_nothing
) -> list[dict[str, Any]]:
    """All ratios of the tiers to each other and to computing; `say` hears of every step."""
    started_s = time.monotonic()
    with _rig(options) as rig:
        _warm_up(rig, options.cached)
        say(f"ttft: loaded and warmed up, {time.monotonic() - started_s:.0f} s")
        results = _two_ratios(rig, options)
        ratios = ", ".join(f"{each['name']} {each['value']}" for each in results)
        say(f"ttft: {ratios}, {time.monotonic() - started_s:.0f} s")
        return results + _worst_tier(rig, options, say)


@contextmanager
def _rig(options: TtftOptions) -> Iterator[TtftRig]:
    from phloem.engine.build import build_core  # brings torch

    longest = max(*options.lengths, options.cached) + NEW_TOKENS + 1
    pages = longest // PAGE_SIZE + 2
    directory = tempfile.mkdtemp(prefix=".bench-tiers-", dir=Path.cwd())
    config = Config(
        model=ModelOptions(model=options.model, dtype="bf16", max_model_len=longest),
        cache=CacheOptions(page_size=PAGE_SIZE, num_pages=pages + NEW_TOKENS // PAGE_SIZE),
        tiers=TierOptions(  # every tier is to be timed, also where computing would be sooner
            host_memory="2GB",
            storage=directory,
            storage_size="4GB",
            prefetch_policy="wait_complete",
        ),
    )
    hooks = KeptChunks()
    core = build_core(config, hooks, ())
    try:
        yield TtftRig(core, hooks)
    finally:
        core.close()
        shutil.rmtree(directory, ignore_errors=True)


def _warm_up(rig: TtftRig, cached: int) -> None:
    """Every way once: threads, buffers, and the cost model's first measurements."""
    prefix = rig.fresh(min(512, cached))
    rig.ask(prefix)
    for forget in (rig.forget_device, rig.forget_host):
        forget()
        rig.ask(prefix + rig.fresh(NEW_TOKENS))


def _sample(rig: TtftRig, prefix: list[int], tier: str, way: Forced | None = Forced.LOAD) -> float:
    """One request whose prefix is in `tier`; `way` None: the engine chooses what to do with it."""
    if tier == "host":
        rig.forget_device()
    elif tier == "storage":
        rig.forget_host()
    rig.force(way)
    seconds, cached = rig.ask(prefix + rig.fresh(NEW_TOKENS))
    rig.force(None)
    whole = len(prefix) // PAGE_SIZE * PAGE_SIZE
    if way is Forced.LOAD:
        got = getattr(cached, tier)
        assert got == whole, f"asked for {whole} tokens from {tier}, got {cached}"
    return seconds


def _pairs(
    count: int, first: Callable[[], float], second: Callable[[], float]
) -> list[tuple[float, float]]:
    """Interleaved, in alternating order."""
    out = []
    for index in range(count):
        if index % 2:
            b, a = second(), first()
        else:
            a, b = first(), second()
        out.append((a, b))
    return out


def _two_ratios(rig: TtftRig, options: TtftOptions) -> list[dict[str, Any]]:
    prefix = rig.fresh(options.cached)
    cold = [rig.ask(prefix + rig.fresh(NEW_TOKENS))[0]]
    cold += [
        rig.ask(rig.fresh(options.cached + NEW_TOKENS))[0] for _ in range(options.cold_samples - 1)
    ]
    rig.forget_host()
    rig.ask(prefix + rig.fresh(NEW_TOKENS))  # back on the device
    device_host = _pairs(
        options.pairs,
        lambda: _sample(rig, prefix, "device"),
        lambda: _sample(rig, prefix, "host"),
    )
    storage = [_sample(rig, prefix, "storage") for _ in range(max(3, options.pairs // 3))]
    return [
        _result(
            "host_hit_over_device_hit_ttft",
            statistics.median(host / device for device, host in device_host),
            {"device_s": [d for d, _ in device_host], "host_s": [h for _, h in device_host]},
        ),
        _result(
            "storage_hit_over_cold_ttft",
            statistics.median(storage) / statistics.median(cold),
            {"storage_s": storage, "cold_s": cold},
        ),
    ]


def _worst_tier(
    rig: TtftRig, options: TtftOptions, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """What the engine chooses by itself against the better of always loading and never."""
    bounds: dict[str, float] = {}
    controls: list[tuple[float, float]] = []
    for length in options.lengths:
        started_s = time.monotonic()
        prefix = rig.fresh(length)
        rig.ask(prefix)
        for tier in ("host", "storage"):
            ways = {way: _sample(rig, prefix, tier, way) for way in Forced}
            best = min(ways, key=lambda way: ways[way])
            pairs = _pairs(
                options.pairs,
                partial(_sample, rig, prefix, tier, None),
                partial(_sample, rig, prefix, tier, best),
            )
            bounds[f"{tier}_{length}"] = upper_bound([a / b for a, b in pairs])
        one = partial(_sample, rig, prefix, "device")
        controls += _pairs(options.pairs, one, one)
        say(
            f"ttft: {length:,} tokens: host {bounds[f'host_{length}']:.3f}, "
            f"storage {bounds[f'storage_{length}']:.3f}, {time.monotonic() - started_s:.0f} s"
        )
    return [
        _result("worst_tier_over_best_bound", max(bounds.values()), bounds),
        _result("aa_control", upper_bound([a / b for a, b in controls]), len(controls)),
    ]


def upper_bound(ratios: list[float]) -> float:
    """The 95 % upper bound of the median, by seeded resampling."""
    rng = random.Random(len(ratios))
    medians = sorted(
        statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES)
    )
    return medians[int(0.95 * _RESAMPLES)]


def _result(name: str, value: float, samples: Any) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "unit": "ratio", "samples": samples}
