"""A whole engine without weights: real loop, scheduler and cache over page memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from phloem.cache import (
    CacheState,
    HostTier,
    PrefixCache,
    ReplicaConfig,
    WindowConfig,
    check_invariants,
)
from phloem.core.clock import VirtualClock
from phloem.core.namespace import make_namespace
from phloem.core.plan import RowResult, StepPlan, StepResult
from phloem.core.request import FinishReason, GenerateRequest, OutputChunk, SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.kv.keys import KeyFacts
from phloem.kv.layout import PageLayout
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.loop import EngineLoop
from phloem.sched import Scheduler, SchedulerConfig
from phloem.sim import (
    FakeWindow,
    FakeWorker,
    NextToken,
    SimStorage,
    SimTransfers,
    cold,
    hash_model,
)
from phloem.tiers import StorageKeys, TierConfig, TierController
from phloem.tiers.config import is_exclusive

VOCAB = 997
NAMESPACE = make_namespace(model="fake")


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def key_facts(page_size: int, seed_of_weights: int, window: WindowConfig | None = None) -> KeyFacts:
    def layout(layers: int, retention: int | None) -> PageLayout:
        spec = KVSpec(
            kind=AttentionKind.GQA,
            dtype=KVDtype.FP32,
            num_layers=layers,
            num_kv_heads=1,
            head_dim=1,
            page_size=page_size,
            retention=retention,
        )
        return PageLayout(spec, 1, 1)

    return KeyFacts(
        weights=b"%d" % seed_of_weights,
        weight_quantisation="none",
        model={},
        layout=layout(1, None),
        window=None if window is None else layout(window.layers, window.tokens),
    )


class Rig:
    """Adds requests, steps, keeps every chunk, and compares answers with `cold`."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        num_pages: int = 64,
        num_owners: int = 1,
        placement: str = "striped",
        max_model_len: int = 4096,
        model: NextToken | None = None,
        cache_enabled: bool = True,
        fail_row=lambda serial, index: None,
        host_pages: int = 0,
        tiers: TierConfig | None = None,
        transfers: dict | None = None,
        storage: SimStorage | None = None,
        seed_of_weights: int = 0,
        window: WindowConfig | None = None,
        replicas: ReplicaConfig | None = None,
        **config,
    ) -> None:
        """`num_pages` are those of each owner, as are `window.pages`, given once."""
        self.page_size = page_size
        pools = (num_pages,) * num_owners
        if window is not None:
            window = replace(window, pages=window.pages * num_owners)
        self.config = SchedulerConfig(max_model_len=max_model_len, **config)
        self.cache = PrefixCache(
            page_size=page_size,
            num_pages=pools,
            placement=placement,
            enabled=cache_enabled,
            record_freed=True,
            host=HostTier(pages=host_pages, exclusive=is_exclusive(sum(pools), host_pages)),
            window=window,
        )
        if replicas is not None:
            self.cache.keep_replicas(replicas)
        self.clock = VirtualClock()
        self.follower = CacheState(
            page_size, self.cache.num_pages, host_pages=host_pages, window=self.cache.window
        )
        self.cache.leader.log.attach(self.follower)
        self.model = hash_model(VOCAB) if model is None else model
        self.worker = RecordingWorker(
            self.model,
            num_pages=num_pages,
            num_owners=num_owners,
            page_size=page_size,
            max_running=self.config.max_running,
            max_model_len=max_model_len,
            fail_row=fail_row,
            window=None
            if window is None
            else FakeWindow(tokens=window.tokens, layers=window.layers, num_pages=window.pages[0]),
        )
        self.tiers: TierController | None = None
        if host_pages:
            self.transfers = self.worker.gate = SimTransfers(
                self.clock,
                num_host_pages=host_pages,
                memory=self.worker.memory,
                storage=storage,
                **(transfers or {}),
            )
            if window is not None:
                self.transfers.add_window(
                    num_host_pages=window.host_pages, memory=self.worker.memories[1]
                )
            config_of_tiers = TierConfig() if tiers is None else tiers
            keys = None
            if storage is not None:
                keys = StorageKeys(
                    facts=key_facts(page_size, seed_of_weights, window),
                    attached=lambda: True,
                    take_gone=storage.take_gone,
                )
            self.tiers = TierController(
                self.cache, self.transfers, self.clock, config_of_tiers, keys
            )
        self.scheduler = Scheduler(self.config, self.cache, self.tiers)
        self.loop = EngineLoop(self.scheduler, self.worker, self.clock, self._take)
        self.requests: dict[str, GenerateRequest] = {}
        self.answers: dict[str, list[int]] = {}
        self.last: dict[str, OutputChunk] = {}
        self.started_at: dict[str, int] = {}
        self.steps = 0

    def _take(self, chunks: Sequence[OutputChunk]) -> None:
        for chunk in chunks:
            assert self.last.get(chunk.request_id) is None, f"{chunk} comes after the end"
            self.started_at.setdefault(chunk.request_id, self.steps)
            self.answers[chunk.request_id] += chunk.tokens
            if chunk.finish is not None:
                self.last[chunk.request_id] = chunk

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        namespace: bytes = NAMESPACE,
        routing_key: str | None = None,
        priority: int = 0,
        **sampling,
    ) -> GenerateRequest:
        request = GenerateRequest(
            request_id=request_id,
            tokens=tokens_to_bytes(prompt),
            sampling=SamplingParams(**sampling),
            namespace=namespace,
            routing_key=routing_key,
            priority=priority,
        )
        self.loop.add(request)
        self.requests[request_id] = request
        self.answers[request_id] = []
        return request

    def step(self, count: int = 1) -> bool:
        more = True
        for _ in range(count):
            self.steps += 1
            more = self.loop.step()
        return more

    def run(self, limit: int = 20_000) -> None:
        """Until idle; a loop that never becomes idle fails."""
        for _ in range(limit):
            if not self.step():
                assert self.loop.dead is None, self.loop.dead
                assert self.loop.idle, "nothing to do, yet requests are left"
                return
        raise AssertionError(f"not idle after {limit} steps")

    def cold(self, request_id: str) -> list[int]:
        request = self.requests[request_id]
        return cold(self.model, request.tokens, request.sampling, eos_ids=self.config.eos_ids)

    def check_answers(self) -> None:
        """Every finished answer is cold's; every cut-off one is a beginning of it."""
        for request_id, chunk in self.last.items():
            expected, got = self.cold(request_id), self.answers[request_id]
            if chunk.finish in (FinishReason.STOP, FinishReason.LENGTH):
                assert got == expected, f"{request_id} ({chunk.finish}) differs from cold"
            else:
                assert got == expected[: len(got)], f"{request_id} ({chunk.finish}) differs"
            cached = chunk.cached.total
            longest = (chunk.prompt_tokens - 1) // self.page_size * self.page_size
            assert 0 <= cached <= longest
            assert cached % self.page_size == 0

    def check_replicas(self) -> None:
        """The follower, which has seen commands alone, is where the leader is."""
        assert self.follower.digest() == self.cache.state.digest(), "replicas differ"

    def check_idle(self) -> None:
        """All that must hold when nothing runs, O-05's exact pages included."""
        assert self.loop.idle
        self.check_answers()
        assert set(self.last) == set(self.requests), "some request never ended"
        check_invariants(self.cache, idle=True)
        stats = self.loop.stats()
        sources = stats.cached_tokens_total.total + stats.computed_tokens_total
        assert sources == stats.prompt_tokens_total, "token sources do not sum to the prompts"
        self.check_replicas()
        assert self.cache.locked_pages == 0
        self.cache.flush()
        assert self.cache.free_pages == self.cache.total_pages
        if self.cache.window is not None:
            assert self.cache.leader.window.free_pages == sum(self.cache.window.pages)
        check_invariants(self.cache, idle=True)


class RecordingWorker(FakeWorker):
    """Keeps every plan."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().submit(plan)


class FailingWorker:
    """Fails at step `at`, on submit or on collect."""

    def __init__(self, at: int, where: str) -> None:
        self.at, self.where = at, where
        self.queue: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        if self.where == "submit" and plan.step == self.at:
            raise RuntimeError("out of memory")
        self.queue.append(plan)

    def collect(self) -> StepResult:
        plan = self.queue.pop(0)
        if self.where == "collect" and plan.step == self.at:
            raise RuntimeError("out of memory")
        rows = [RowResult(row=r.row, serial=r.serial, token=1) for r in plan.rows if r.sample]
        return StepResult(step=plan.step, rows=tuple(rows))

    def wait(self, timeout_s: float) -> bool:
        return True

    def cancel(self, serial: int) -> None:
        pass

    def close(self) -> None:
        self.queue.clear()
