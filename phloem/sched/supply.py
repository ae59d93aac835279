"""Pages for the next step of running requests, and who gives some back where they run out.

The oldest request always goes on: the one admitted last gives its pages back, and those are tried
again. While transfers or a step in flight will free pages soon, a request sits the step out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from phloem.core.errors import NoRoom
from phloem.kv.sizing import pages_for_tokens
from phloem.sched.running import RunningSet
from phloem.sched.state import Phase, RequestState
from phloem.sched.windows import WindowBudget

if TYPE_CHECKING:
    from phloem.tiers import TierController

__all__ = ["PageSupply"]


class PageSupply:
    """`retract(request)` puts a running request back into the queue."""

    def __init__(
        self,
        running: RunningSet,
        windows: WindowBudget,
        *,
        page_size: int,
        retract: Callable[[RequestState], None],
        tiers: TierController | None,
    ) -> None:
        self._running = running
        self._windows = windows
        self._page_size = page_size
        self._retract = retract
        self._tiers = tiers

    def has_page_for_next(self, request: RequestState) -> bool:
        """Make sure of pages for the next token; False if this request must sit this step out."""
        missing = pages_for_tokens(request.num_planned + 1, self._page_size) - request.num_pages
        begins_page = False
        if self._windows.enabled:
            self._running.advance_window(request)
            begins_page = request.num_planned % self._page_size == 0
        while missing > 0 or begins_page:
            try:
                if missing > 0:
                    self._running.extend(request, missing)
                    missing = 0
                if begins_page:
                    self._running.extend_window(request, 1)
                break
            except NoRoom:
                if not self._make_room(request):
                    return False
        return True

    def grant(self, request: RequestState, count: int) -> int:
        """How many of a prefill's next tokens there are window pages for; it has them then."""
        if not self._windows.enabled or not count:
            return count
        if request.phase is not Phase.PREFILL:
            return 0  # retracted, for one before it
        self._running.advance_window(request)
        while True:
            granted = self._windows.room_for(request, count)
            if granted:
                self._running.extend_window(request, granted)
                return granted
            if not self._make_room(request):
                return 0

    def _make_room(self, request: RequestState) -> bool:
        """Retract somebody for a running request; False if it must sit this step out."""
        if self._tiers is not None and self._tiers.frees_pages:
            return False  # transfers end soon: wait for the pages that they lock
        victim, others_go_on = self._newest()
        if victim is request and (request.phase is Phase.PREFILL or not others_go_on):
            return False  # others make room: they end, or go on before it
        self._retract(victim)
        return victim is not request

    def _newest(self) -> tuple[RequestState, bool]:
        """The last admitted request with something left to compute; is it not the only one?"""
        going_on = [r for r in self._running if r.phase is Phase.PREFILL or r.wants_decode]
        return going_on[-1], len(going_on) > 1
