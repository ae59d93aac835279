"""Counters of the scheduler; every fact is counted where it happens, once."""

from __future__ import annotations

from collections import Counter

from phloem.core.request import CachedTokens, FinishReason
from phloem.core.stats import CacheStats, EngineStats, RemoteStats, TierStats

__all__ = ["Counters"]


class Counters:
    """They only grow."""

    def __init__(self) -> None:
        self.steps = 0
        self.planned_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0  # on the device
        self.host_tokens = 0  # loaded from the host
        self.storage_tokens = 0  # loaded from the host, where they had come from storage
        self.computed_tokens = 0  # of prompts, at first admission
        self.generated_tokens = 0
        self.recomputed_tokens = 0
        self.retractions = 0
        self.restarts = 0
        self.restarted_tokens = 0
        self.refused = 0
        self.compute_s = 0.0
        self.finished: Counter[FinishReason] = Counter()

    def snapshot(
        self,
        *,
        running: int,
        queued: int,
        cache: CacheStats,
        tiers: TierStats | None = None,
        remote: RemoteStats | None = None,
    ) -> EngineStats:
        """All of them at this moment."""
        return EngineStats(
            running=running,
            queued=queued,
            cache=cache,
            tiers=tiers,
            remote=remote,
            steps_total=self.steps,
            prompt_tokens_total=self.prompt_tokens,
            cached_tokens_total=CachedTokens(
                device=self.cached_tokens, host=self.host_tokens, storage=self.storage_tokens
            ),
            computed_tokens_total=self.computed_tokens,
            generated_tokens_total=self.generated_tokens,
            recomputed_tokens_total=self.recomputed_tokens,
            retractions_total=self.retractions,
            restarts_total=self.restarts,
            restarted_tokens_total=self.restarted_tokens,
            refused_total=self.refused,
            finished_total=tuple((why.value, self.finished[why]) for why in FinishReason),
            compute_s_total=self.compute_s,
        )
