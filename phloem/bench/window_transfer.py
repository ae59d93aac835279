"""Bytes of window state that leave the device for one long prompt, against a copy of all of it.

The real loop, scheduler, cache and tier controller, over a worker and transfers without weights;
page contents are checked wherever they are read. A second engine on the same storage repeats the
prompt: what is saved must not cost the hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phloem.cache import HostTier, PrefixCache, WindowConfig
from phloem.core.clock import VirtualClock
from phloem.core.namespace import make_namespace
from phloem.core.request import CachedTokens, GenerateRequest, OutputChunk, SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.core.transfer import TransferKind
from phloem.kv.keys import KeyFacts
from phloem.kv.layout import PageLayout
from phloem.kv.sizing import default_checkpoint, pages_for_tokens
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.loop import EngineLoop
from phloem.sched import Scheduler, SchedulerConfig
from phloem.sim import FakeWindow, FakeWorker, SimStorage, SimTransfers, hash_model
from phloem.tiers import StorageKeys, TierConfig, TierController

__all__ = ["TransferBytes", "measure_transfer_bytes", "transfer_bytes_ratio"]

PROMPT_TOKENS, WINDOW_TOKENS, PAGE_SIZE = 20_480, 4_096, 16
WINDOW_LAYERS, FULL_LAYERS = 24, 4
VOCAB = 32_000
FLUSH_S = 600.0  # of virtual time


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferBytes:
    """Window bytes moved, as parts of a full copy's; and what a restarted engine finds of the
    prompt, of `restorable` tokens."""

    host: float
    storage: float
    restored: CachedTokens
    restorable: int


def transfer_bytes_ratio() -> float:
    """The larger of both parts (issue 4, point 5: at most 1/4.9)."""
    found = measure_transfer_bytes()
    return max(found.host, found.storage)


def measure_transfer_bytes(
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    window_tokens: int = WINDOW_TOKENS,
    page_size: int = PAGE_SIZE,
) -> TransferBytes:
    """One prompt, one token of answer, an orderly end; then the prompt again after a restart."""
    storage = SimStorage()
    engines = [_Engine(prompt_tokens, window_tokens, page_size, storage) for _ in range(2)]
    engines[0].run()
    restored = engines[1].run()
    full_copy = pages_for_tokens(prompt_tokens, page_size) * engines[0].window_page_bytes
    moved = engines[0].transfers.num_bytes
    return TransferBytes(
        host=moved[TransferKind.BACKUP_HOST, 1] / full_copy,
        storage=moved[TransferKind.BACKUP_STORAGE, 1] / full_copy,
        restored=restored,
        restorable=(prompt_tokens - 1) // page_size * page_size,
    )


class _Engine:
    """One life of an engine: real above the worker and the transfers."""

    def __init__(
        self, prompt_tokens: int, window_tokens: int, page_size: int, storage: SimStorage
    ) -> None:
        self._prompt_tokens = prompt_tokens
        clock = VirtualClock()
        num_pages = pages_for_tokens(prompt_tokens, page_size) + 8
        window = WindowConfig(
            tokens=window_tokens,
            layers=WINDOW_LAYERS,
            pages=(num_pages,),
            host_pages=num_pages,
            checkpoint=pages_for_tokens(default_checkpoint(window_tokens), page_size),
        )
        specs = [
            _spec(FULL_LAYERS, page_size, None),
            _spec(WINDOW_LAYERS, page_size, window_tokens),
        ]
        self.window_page_bytes = specs[1].page_bytes
        host = HostTier(pages=4 * num_pages)
        cache = PrefixCache(page_size=page_size, num_pages=(num_pages,), host=host, window=window)
        worker = FakeWorker(
            hash_model(VOCAB),
            num_pages=num_pages,
            page_size=page_size,
            max_running=1,
            max_model_len=prompt_tokens + page_size,
            window=FakeWindow(tokens=window_tokens, layers=WINDOW_LAYERS, num_pages=num_pages),
        )
        self.transfers = worker.gate = SimTransfers(
            clock, num_host_pages=host.pages, memory=worker.memories[0], storage=storage
        )
        self.transfers.add_window(
            num_host_pages=num_pages,
            memory=worker.memories[1],
            page_bytes=(specs[0].page_bytes, specs[1].page_bytes),
        )
        facts = KeyFacts(
            weights=b"bench",
            weight_quantisation="none",
            model={},
            layout=PageLayout(specs[0], num_pages, 1),
            window=PageLayout(specs[1], num_pages, 1),
        )
        self._tiers = TierController(
            cache,
            self.transfers,
            clock,
            TierConfig(
                prefetch_policy="wait_complete",
                page_bytes=specs[0].page_bytes,
                window_page_bytes=specs[1].page_bytes,
            ),
            StorageKeys(facts=facts, attached=lambda: True),
        )
        config = SchedulerConfig(max_model_len=prompt_tokens + page_size, max_running=1)
        self._chunks: list[OutputChunk] = []
        self._loop = EngineLoop(Scheduler(config, cache, self._tiers), worker, clock, self._take)

    def run(self) -> CachedTokens:
        """Serve the prompt and shut down; returns what was cached of it."""
        ids = [
            (7 * position * position + 13 * position) % VOCAB
            for position in range(self._prompt_tokens)
        ]
        request = GenerateRequest(
            request_id="prompt",
            tokens=tokens_to_bytes(ids),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            namespace=make_namespace(model="bench"),
        )
        self._loop.add(request)
        while self._loop.step():
            pass
        assert self._loop.dead is None, self._loop.dead
        self._tiers.flush(FLUSH_S)
        return self._chunks[-1].cached

    def _take(self, chunks: Sequence[OutputChunk]) -> None:
        self._chunks.extend(chunks)


def _spec(layers: int, page_size: int, retention: int | None) -> KVSpec:
    return KVSpec(
        kind=AttentionKind.GQA,
        dtype=KVDtype.BF16,
        num_layers=layers,
        num_kv_heads=4,
        head_dim=256,
        page_size=page_size,
        retention=retention,
    )
