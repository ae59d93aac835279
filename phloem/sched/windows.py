"""Window pages of running requests: how many each needs, and whether there is room for one more.

A request takes window pages chunk by chunk and lets go of them as it moves on, so it holds the
tail of where it is, what it computes now, and what it has in flight:

    page     0 .......... low ............ committed ......... planned
    window   | let go     |---- tail ------|---- in flight -----|-- next chunk --|

Full pages are reserved whole at admission. If these were, a pool of windows would have to hold
whole prompts; so they may run out on the way, and then the newest request gives its own back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from phloem.cache import Match, WindowMatch
from phloem.core.errors import ConfigError
from phloem.kv.sizing import least_window_pages, pages_for_tokens, window_chunk_pages
from phloem.sched.state import Phase, RequestState

if TYPE_CHECKING:
    from phloem.cache import PrefixCache, WindowConfig

__all__ = ["WindowBudget", "first_to_compute"]


def first_to_compute(match: Match) -> int:
    """The page from which a request on this match computes, if nothing is loaded for it."""
    if not isinstance(match, WindowMatch):
        return match.num_pages
    return match.restart_start() // match.page_size


class WindowBudget:
    """Asks, never takes. Without windows there is always room."""

    def __init__(self, cache: PrefixCache, *, max_prefill_tokens: int, max_model_len: int) -> None:
        """Raises ConfigError if a request that runs alone could come to a halt."""
        self._cache = cache
        self._page_size = cache.page_size
        self._step_pages = pages_for_tokens(max_prefill_tokens, cache.page_size)
        window = cache.window
        self.enabled = window is not None
        self.total_pages = 0
        self._steady = self._least_chunk = 0
        if window is not None:
            self._set_up(window, max_model_len)

    def _set_up(self, window: WindowConfig, max_model_len: int) -> None:
        # A page of window state lies where its full page does, and that may be anywhere: so each
        # rank must be able to hold all that one request has of it.
        self.total_pages = min(window.pages)
        self._steady = least_window_pages(window.tokens, self._page_size)
        self._least_chunk = window_chunk_pages(sum(window.pages), self._page_size)
        longest = min(max_model_len, self._cache.total_pages * self._page_size)
        least = self.needs(longest)
        if self.total_pages < least:
            raise ConfigError(
                f"a window of {window.tokens} tokens needs {least} window pages of "
                f"{self._page_size} tokens, their pool has {self.total_pages}: give it more"
            )

    def needs(self, num_positions: int) -> int:
        """Pages that a request of so many positions holds at most, chunks in flight not counted."""
        return min(self._steady, pages_for_tokens(num_positions, self._page_size))

    def has_room(self, request: RequestState, running: Iterable[RequestState]) -> bool:
        """May `request` start beside those that run?"""
        if not self.enabled:
            return True
        own = claims = self.needs(request.final_tokens)
        chunks = self._chunk_pages(request.num_tokens)
        alone = True
        for other in running:
            alone = False
            claims += max(0, self.needs(other.final_tokens) - _held(other))
            if other.phase is Phase.PREFILL:
                chunks += self._chunk_pages(other.prefill_end)
        if not alone:
            claims += min(chunks, self._step_pages)
        room = self._cache.window_room()
        return own <= min(room) and claims <= min(room) * len(room)

    def room_for(self, request: RequestState, count: int) -> int:
        """How many of the next `count` tokens there are pages for; whole pages, or all of them."""
        assert request.reservation is not None, f"{request.request_id} is not running"
        window = request.reservation.window
        assert window is not None, f"{request.request_id} has no window pages"
        start = request.num_planned
        # Half of what nobody would miss: the next chunk is planned before this one lets go of it.
        chunk = max(self._least_chunk, self._cache.window_slack() // 2)
        end_page = window.end + request.reservation.window_fitting(chunk)
        if end_page >= pages_for_tokens(start + count, self._page_size):
            return count
        return max(0, end_page * self._page_size - start)

    def _chunk_pages(self, num_tokens: int) -> int:
        """What a chunk of a prompt of so many tokens takes beside what it holds at most."""
        more = pages_for_tokens(num_tokens, self._page_size) - self._steady
        return max(0, min(more, self._least_chunk))


def _held(request: RequestState) -> int:
    assert request.reservation is not None, f"{request.request_id} is not running"
    window = request.reservation.window
    return 0 if window is None else window.end - window.low
