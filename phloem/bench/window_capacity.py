"""How many tokens of long prompts a memory keeps, against what its window layers would allow.

A cache that keeps every layer's state of every token (one pool) holds 1 / (Lf + Ls) tokens per
layer-token of memory. With windows a prompt of S tokens needs Lf S + Ls W, so at best there is room
for (Lf + Ls) / (Lf + Ls W / S) times as many; with a checkpoint every C tokens for
(Lf + Ls) / (Lf + Ls min(1, W / C)) times as many.

Measured: the real sizing divides a memory, the real loop, scheduler and cache (and tiers) are fed
prompts until well past full, and then the cache is asked for each prompt how much of it a next turn
would find, on the device or, with all device pages gone, on the host.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phloem.cache import HostTier, PrefixCache, WindowConfig
from phloem.core.clock import VirtualClock
from phloem.core.namespace import make_namespace
from phloem.core.request import GenerateRequest, OutputChunk, SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.kv.sizing import PoolDemand, default_checkpoint, pages_for_tokens, pool_pages
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.loop import EngineLoop
from phloem.sched import Scheduler, SchedulerConfig
from phloem.sim import CostWorker, SimTransfers
from phloem.tiers import TierConfig, TierController
from phloem.tiers.config import is_exclusive

__all__ = ["GEMMA3", "GPT_OSS", "Capacity", "Mix", "measure_capacity"]

PROMPT_TOKENS = 16_384
PAGE_SIZE = 16
NUM_PROMPTS = 128  # fit at best
OVERFILL = 1.25
VOCAB_SIZE = 32_000
_NAMESPACE = make_namespace(model="bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A model's layers; all of them have equal heads."""

    name: str
    full_layers: int
    window_layers: int
    window: int
    num_kv_heads: int
    head_dim: int

    def specs(self) -> tuple[KVSpec, KVSpec]:
        full = KVSpec(
            kind=AttentionKind.GQA,
            dtype=KVDtype.BF16,
            num_layers=self.full_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=PAGE_SIZE,
        )
        return full, replace(full, num_layers=self.window_layers, retention=self.window)

    def most(self, kept_share: float) -> float:
        """Times the tokens of one pool, where so much of the window layers' state is kept."""
        layers = self.full_layers + self.window_layers
        return layers / (self.full_layers + self.window_layers * min(1.0, kept_share))


GEMMA3 = Mix(  # 27B
    name="gemma3", full_layers=10, window_layers=52, window=1024, num_kv_heads=16, head_dim=128
)
GPT_OSS = Mix(  # 20b
    name="gpt_oss", full_layers=12, window_layers=12, window=128, num_kv_heads=8, head_dim=64
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Tokens that can be gone on from, in all; `over_limit`: of what the formula allows."""

    tokens: int
    budget_bytes: int
    over_one_pool: float
    over_limit: float


def measure_capacity(
    mix: Mix, *, checkpoints: bool, host: bool = False, num_prompts: int = NUM_PROMPTS
) -> Capacity:
    """Fill a memory for `num_prompts` prompts, and count. `host`: the memory is the host's."""
    checkpoint = default_checkpoint(mix.window) if checkpoints else 0
    limit = mix.most(mix.window / (checkpoint or PROMPT_TOKENS))
    specs = mix.specs()
    one_pool_bytes = sum(spec.token_bytes for spec in specs)  # of a token
    budget = int(num_prompts * PROMPT_TOKENS * one_pool_bytes / limit)
    engine = _Engine(specs, budget, checkpoint, host=host)
    prompts = [_prompt(number) for number in range(int(num_prompts * OVERFILL))]
    for number, prompt in enumerate(prompts):
        engine.serve(str(number), prompt)
    tokens = sum(engine.restorable(prompt) for prompt in prompts)
    over_one_pool = tokens * one_pool_bytes / budget
    return Capacity(
        tokens=tokens,
        budget_bytes=budget,
        over_one_pool=over_one_pool,
        over_limit=over_one_pool / limit,
    )


def _prompt(number: int) -> bytes:
    rng = random.Random(number)
    return tokens_to_bytes([rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)])


class _Engine:
    """The real parts above a worker that computes nothing."""

    def __init__(
        self, specs: tuple[KVSpec, KVSpec], budget: int, checkpoint: int, *, host: bool
    ) -> None:
        window = specs[1].retention
        assert window is not None, "the second component is the window"
        demand = PoolDemand(
            max_model_len=2 * PROMPT_TOKENS,
            max_running=16,
            max_prefill_tokens=2048,
            checkpoint=checkpoint,
        )
        device = pool_pages(specs, budget // 4 if host else budget, demand)
        on_host: tuple[int, ...] = (0, 0)
        if host:
            on_host = pool_pages(
                specs, budget, replace(demand, max_running=0, max_prefill_tokens=0)
            )
        self._host = host
        self.cache = PrefixCache(
            page_size=PAGE_SIZE,
            num_pages=(device[0],),
            host=HostTier(pages=on_host[0], exclusive=is_exclusive(device[0], on_host[0])),
            window=WindowConfig(
                tokens=window,
                layers=specs[1].num_layers,
                pages=(device[1],),
                host_pages=on_host[1],
                checkpoint=pages_for_tokens(checkpoint, PAGE_SIZE),
            ),
        )
        clock = VirtualClock()
        tiers = None
        worker = CostWorker(clock)
        if host:
            worker.gate = SimTransfers(clock, num_host_pages=on_host[0])
            page_bytes = (specs[0].page_bytes, specs[1].page_bytes)
            worker.gate.add_window(num_host_pages=on_host[1], page_bytes=page_bytes)
            config = TierConfig(page_bytes=page_bytes[0], window_page_bytes=page_bytes[1])
            tiers = TierController(self.cache, worker.gate, clock, config)
        settings = SchedulerConfig(
            max_model_len=demand.max_model_len,
            max_running=demand.max_running,
            max_prefill_tokens=demand.max_prefill_tokens,
        )
        scheduler = Scheduler(settings, self.cache, tiers)
        self._loop = EngineLoop(scheduler, worker, clock, self._take)

    def _take(self, chunks: Sequence[OutputChunk]) -> None:
        """Nobody reads the answers."""

    def serve(self, request_id: str, prompt: bytes) -> None:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self._loop.add(
            GenerateRequest(
                request_id=request_id, tokens=prompt, sampling=sampling, namespace=_NAMESPACE
            )
        )
        self._loop.run_until_idle()

    def restorable(self, prompt: bytes) -> int:
        """How many tokens of the prompt a next turn need not compute."""
        if self._host:
            self.cache.evict(self.cache.total_pages)
        match = self.cache.match(_NAMESPACE, prompt)
        return (match.num_pages + match.host_pages) * PAGE_SIZE
