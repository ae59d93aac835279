"""Loads or recomputes: asks the cost model for each request, and remembers why."""

from __future__ import annotations

import logging

from phloem.cache import Match, WindowMatch
from phloem.core.transfer import TransferKind
from phloem.tiers.cost import CostModel, LoadChoice
from phloem.tiers.decisions import Choice, Decision, Decisions, StorageWay
from phloem.tiers.windows import ways_to_begin

__all__ = ["LoadChooser"]

logger = logging.getLogger(__name__)

NOTHING = "nothing of it is on the host alone"
HAS_FAILED = "a load of it has failed"
FORCED = "the way is prescribed"
SOONEST = {
    Choice.LOAD: "loading all of it is soonest",
    Choice.PART: "loading a part while the rest is computed is soonest",
    Choice.RECOMPUTE: "computing is sooner than loading",
}


class LoadChooser:
    """One per controller."""

    def __init__(self, cost: CostModel, page_size: int) -> None:
        self._cost = cost
        self._page_size = page_size
        self.decisions = Decisions()

    def choose(
        self, request_id: str, match: Match, num_tokens: int, storage: StorageWay | None
    ) -> int:
        """How many of the match's host pages to load for a request of `num_tokens` in all."""
        asked = self._ask(match, num_tokens)
        if not match.host_pages:
            self._note(request_id, match, num_tokens, storage, asked, Choice.NONE, NOTHING)
            return 0
        self._cost.count(asked, match.host_pages)
        way = _choice(asked.pages, match.host_pages)
        reason = SOONEST[way] if self._cost.forced is None else FORCED
        self._note(request_id, match, num_tokens, storage, asked, way, reason)
        return asked.pages

    def give_up(
        self, request_id: str, match: Match, num_tokens: int, storage: StorageWay | None
    ) -> None:
        """It computes whatever is not on the device, because a load has failed."""
        asked = self._ask(match, num_tokens)
        none = LoadChoice(
            pages=0,
            chosen_s=asked.recompute_s,
            load_all_s=asked.load_all_s,
            recompute_s=asked.recompute_s,
        )
        way = Choice.RECOMPUTE if match.host_pages else Choice.NONE
        self._note(request_id, match, num_tokens, storage, none, way, HAS_FAILED)

    def _ask(self, match: Match, num_tokens: int) -> LoadChoice:
        if isinstance(match, WindowMatch):
            return self._ask_of_windows(match, num_tokens)
        reached = (match.num_pages + match.host_pages) * self._page_size
        return self._cost.choose_load(match.host_pages, num_tokens - reached)

    def _ask_of_windows(self, match: WindowMatch, num_tokens: int) -> LoadChoice:
        """What is not loaded may be begun lower down instead of where the device match ends."""
        cost, ways = self._cost, ways_to_begin(match)
        way = cost.choose_way(ways, num_tokens)
        longest = max(ways, key=lambda each: each.start if each.loads else -1)
        return LoadChoice(
            pages=way.start // self._page_size - match.num_pages if way.loads else 0,
            chosen_s=cost.seconds(way, num_tokens),
            load_all_s=cost.seconds(longest, num_tokens),
            recompute_s=cost.seconds(ways[0], num_tokens),
        )

    def _note(
        self,
        request_id: str,
        match: Match,
        num_tokens: int,
        storage: StorageWay | None,
        asked: LoadChoice,
        choice: Choice,
        reason: str,
    ) -> None:
        known = match.num_pages + match.host_pages
        load = self._cost.transfers[TransferKind.LOAD_BACK]
        decision = Decision(
            request_id=request_id,
            prompt_tokens=num_tokens,
            device_pages=match.num_pages,
            host_pages=match.host_pages,
            storage_pages=0 if storage is None else storage.pages_within(match.num_pages, known),
            new_pages=-(-num_tokens // self._page_size) - known,
            load_pages=asked.pages,
            choice=choice,
            reason=reason,
            chosen_s=asked.chosen_s,
            load_all_s=asked.load_all_s,
            compute_all_s=asked.recompute_s,
            measured=self._cost.prefill.measured and (not match.host_pages or load.measured),
            storage=storage,
        )
        self.decisions.note(decision)
        logger.debug("%s", decision)


def _choice(load_pages: int, host_pages: int) -> Choice:
    if load_pages == host_pages:
        return Choice.LOAD
    return Choice.PART if load_pages else Choice.RECOMPUTE
