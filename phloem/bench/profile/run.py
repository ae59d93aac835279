"""`phloem bench profile`: where the time of a decode step goes, in both processes."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phloem.bench.profile.chrome import write_trace
from phloem.bench.profile.points import FRONT_POINTS
from phloem.bench.profile.spans import SPANS_FILE, Recorder, Span, instrument, read_spans
from phloem.bench.profile.steps import StepReport, decode_report
from phloem.bench.report import Result, summary
from phloem.config import CacheOptions, Config, ModelOptions, RuntimeOptions, SchedulerOptions
from phloem.config.checkpoint import read_model_config
from phloem.config.setting import setting, validate
from phloem.core.errors import ConfigError
from phloem.core.request import SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.engine import AsyncEngine, EngineFacts, resolve_model
from phloem.engine.api import TextRequest
from phloem.engine.process import DEFAULT_BUILDER

__all__ = ["ProfileOptions", "run_profile"]

_BUILDER = "phloem.bench.profile.engine_side:build_profiled_core"
_PAGE = 16
_FIRST_ID = 1_000
_WARM_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What runs, and where the trace goes."""

    model: str = setting("smollm2", "a Hugging Face folder, a GGUF file, or smollm2")
    dtype: Literal["auto", "fp32", "bf16"] = setting("bf16", "type of weights and KV")
    quantization: Literal["none", "int8", "q4"] = setting("none", "weights in memory")
    kernels: Literal["auto", "native", "torch"] = setting("auto", "what computes the model")
    threads: int = setting(0, "CPU threads; 0: one per usable core", low=0)
    batches: str = setting("1,32", "rows that decode together, by commas")
    context: int = setting(512, "tokens before each answer", low=1)
    tokens: int = setting(64, "tokens of each answer", low=16)
    out: str = setting("phloem-profile.json", "file of the trace (chrome://tracing, Perfetto)")
    seed: int = setting(0, "seed of the prompts")

    def __post_init__(self) -> None:
        validate(self)
        self.sizes()

    def sizes(self) -> tuple[int, ...]:
        """`batches` as numbers. Raises ConfigError."""
        try:
            sizes = tuple(int(word) for word in self.batches.split(","))
        except ValueError:
            sizes = ()
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"--batches must be numbers by commas, got {self.batches!r}")
        return sizes


def run_profile(options: ProfileOptions) -> tuple[list[Result], dict[str, Any]]:
    """Figures and facts; the trace is written to `options.out`. Raises ConfigError."""
    plain = _run(options, None)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spans.json"
        timed = _run(options, file)
        spans = [*read_spans(file), *timed.spans]
    write_trace(Path(options.out), spans)
    results: list[Result] = []
    for batch in options.sizes():
        report = decode_report(spans, batch)
        if report is None:
            raise ConfigError(f"no steady decode steps of {batch} rows: raise --tokens")
        results += _figures(report, plain.rates[batch], timed.rates[batch])
        results += _sections(options, timed.facts, batch)
    facts = {
        "kernels": timed.facts.kernels,
        "threads": timed.facts.threads,
        "context": options.context,
        "trace": options.out,
    }
    return results, facts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """One engine's life: its facts, tokens a second by batch, and the front's spans."""

    facts: EngineFacts
    rates: dict[int, float]
    spans: list[Span]


def _run(options: ProfileOptions, file: Path | None) -> _Timed:
    """Launch, decode with every batch size, close. `file` None: nothing is timed."""
    recorder = Recorder("front")
    with ExitStack() as stack:
        if file is not None:
            stack.enter_context(instrument(FRONT_POINTS, recorder))
            os.environ[SPANS_FILE] = str(file)
            stack.callback(os.environ.pop, SPANS_FILE, None)
        builder = DEFAULT_BUILDER if file is None else _BUILDER
        engine = AsyncEngine.launch(_config(options), builder=builder)
        rates = asyncio.run(_decode_all(engine, options))
        return _Timed(facts=engine.facts, rates=rates, spans=recorder.spans())


def _config(options: ProfileOptions) -> Config:
    sizes = options.sizes()
    length = options.context + options.tokens + 1
    pages = sum(sizes) * (length // _PAGE + 2)
    return Config(
        model=ModelOptions(
            model=options.model,
            dtype=options.dtype,
            quantization=options.quantization,
            max_model_len=length + _PAGE,
        ),
        cache=CacheOptions(page_size=_PAGE, num_pages=pages),
        scheduler=SchedulerOptions(max_running=max(sizes)),
        runtime=RuntimeOptions(
            threads=options.threads, kernels=options.kernels, log_level="warning"
        ),
    )


async def _decode_all(engine: AsyncEngine, options: ProfileOptions) -> dict[int, float]:
    try:
        rates = {}
        for batch in options.sizes():
            prompts = _prompts(options, batch, engine.card.vocab_size)
            await _decode(engine, prompts, _WARM_TOKENS)  # and the contexts are cached from now on
            rates[batch] = await _decode(engine, prompts, options.tokens)
        return rates
    finally:
        await engine.close()


def _prompts(options: ProfileOptions, batch: int, vocab: int) -> list[bytes]:
    rng = random.Random(f"{options.seed}:{batch}")
    low = min(_FIRST_ID, vocab // 4)
    return [
        tokens_to_bytes([rng.randrange(low, vocab) for _ in range(options.context)])
        for _ in range(batch)
    ]


async def _decode(engine: AsyncEngine, prompts: Sequence[bytes], num_tokens: int) -> float:
    """Tokens a second of all rows, from when the last row has its first token."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    firsts: list[float] = []

    async def one(number: int, tokens: bytes) -> None:
        name = f"{num_tokens}:{len(prompts)}:{number}"
        async for _ in engine.generate(_request(name, tokens, sampling)):
            if len(firsts) == number:
                firsts.append(time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for number, tokens in enumerate(prompts):
            group.create_task(one(number, tokens))
    return len(prompts) * (num_tokens - 1) / (time.perf_counter() - firsts[-1])


def _request(name: str, tokens: bytes, sampling: SamplingParams) -> TextRequest:
    return TextRequest(request_id=name, tokens=tokens, sampling=sampling)


def _figures(report: StepReport, plain: float, timed: float) -> list[Result]:
    stem = f"b{report.batch}"
    out = [
        summary(f"{stem}_step_ms", report.step_ms, "ms"),
        summary(f"{stem}_outside_model_ms", report.outside_ms, "ms"),
        summary(f"{stem}_outside_model_cpu_ms", report.outside_cpu_ms, "ms"),
        summary(f"{stem}_worker_gap_ms", report.gap_ms, "ms"),
        Result(name=f"{stem}_tok_s", value=plain, unit="tokens/s"),
        Result(name=f"{stem}_profiled_over_plain", value=timed / plain, unit="ratio"),
    ]
    for row in report.rows:
        name = f"{stem} {row.group}: {row.name} (x {row.calls:.3g})"
        out.append(summary(name, row.ms, "ms/step"))
    return out


def _sections(options: ProfileOptions, facts: EngineFacts, batch: int) -> list[Result]:
    """Inside of a native layer; of PyTorch's the spans themselves have the parts."""
    if facts.kernels != "native" or facts.card.dtype not in ("bf16", "fp32"):
        return []
    from phloem.bench.profile.sections import layer_sections  # brings torch

    config = read_model_config(resolve_model(options.model).path)
    sections = layer_sections(
        config,
        batch=batch,
        context=options.context,
        dtype_name=facts.card.dtype,
        threads=facts.threads,
    )
    return [
        Result(name=f"b{batch} one by one: {section.name}", value=section.ms, unit="ms/step")
        for section in sections
    ]
