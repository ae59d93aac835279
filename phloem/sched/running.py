"""The running requests: their rows, reservations and pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from phloem.core.plan import RowInit, RowPlan
from phloem.kv.sizing import pages_for_tokens
from phloem.sched.state import Phase, RequestState
from phloem.sched.tables import RowTables

if TYPE_CHECKING:
    from phloem.cache import Reservation
    from phloem.tiers import TierController

__all__ = ["RunningSet"]


class RunningSet:
    """Requests that hold a row and pages, in order of admission."""

    def __init__(
        self, *, max_running: int, page_size: int, tiers: TierController | None = None
    ) -> None:
        self._tiers = tiers
        self.tables = RowTables(max_running)
        self._page_size = page_size
        self._by_serial: dict[int, RequestState] = {}
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._by_serial)

    def __iter__(self) -> Iterator[RequestState]:
        """In order of admission; a snapshot, so requests may leave meanwhile."""
        return iter(list(self._by_serial.values()))

    def get(self, serial: int) -> RequestState | None:
        """The request admitted under `serial`, unless it has left."""
        return self._by_serial.get(serial)

    def still_running(self, rows: Iterable[RowPlan]) -> list[RowPlan]:
        """Those of `rows` whose requests have not left since they were planned."""
        running = self._by_serial
        return [row for row in rows if row.serial in running]

    def start(self, request: RequestState, reservation: Reservation) -> None:
        """QUEUED -> PREFILL: the request takes a row; its prompt's pages are all reserved."""
        request.phase = Phase.PREFILL
        request.row = self.tables.take_row()
        request.serial = self._next_serial
        self._next_serial += 1
        request.reservation = reservation
        request.match = None  # after a retraction its tokens are others
        request.num_pages = reservation.num_pages
        request.num_computed = reservation.num_committed_pages * self._page_size
        request.num_planned = reservation.start
        request.load_pages = (reservation.start - request.num_computed) // self._page_size
        request.write_from = reservation.write_from
        request.window_from = reservation.window_from
        request.prefill_tokens = request.known_tokens()
        request.prefill_end = request.num_tokens
        self._by_serial[request.serial] = request
        init = RowInit(
            row=request.row,
            serial=request.serial,
            sampling=request.request.sampling,
            seed=request.seed,
            stop_ids=request.stop_ids,
            tokens=request.prefill_tokens,
            num_prompt_tokens=request.num_prompt,
        )
        self.tables.start(init, reservation.refs)
        if reservation.window is not None:
            low = reservation.window.low
            if low < reservation.window.end:
                held = reservation.window_refs[low:]
                self.tables.update(request.row, low, held, component=1)

    def loading(self, load_id: int) -> RequestState | None:
        """The running request whose pages the load fills, unless it has left."""
        for request in self._by_serial.values():
            if request.load_id == load_id:
                return request
        return None

    def loads_of(self, rows: Iterable[RowPlan]) -> tuple[int, ...]:
        """Transfers in flight that bring pages which these rows read."""
        tiers = self._tiers
        if tiers is None:
            return ()
        requests = (self._by_serial[row.serial] for row in rows)
        loads = (r.load_id for r in requests if r.load_id is not None)
        return tuple(transfer for load in loads for transfer in tiers.transfers_of(load))

    def stop(self, request: RequestState, phase: Phase) -> None:
        """Give back row, locks and pages; what is committed stays in the tree."""
        assert request.reservation is not None, f"{request.request_id} is not running"
        reservation, request.reservation = request.reservation, None
        reservation.close()
        if self._tiers is not None:
            self._tiers.used(reservation.node, ended=phase is Phase.FINISHED)
            if request.load_id is not None:
                self._tiers.cancel_load(request.load_id)
        request.load_id = None
        request.load_pages = 0
        self.tables.release(request.row)
        del self._by_serial[request.serial]
        request.phase = phase
        request.row = request.serial = -1
        request.num_pages = request.num_computed = request.num_planned = 0
        request.num_pending = 0
        request.prefill_tokens = b""

    def extend(self, request: RequestState, num_new_pages: int) -> None:
        """More pages for a running request. Raises NoRoom and changes nothing."""
        assert request.reservation is not None, f"{request.request_id} is not running"
        request.reservation.extend(num_new_pages)
        new = request.reservation.refs[request.num_pages :]
        self.tables.update(request.row, request.num_pages, new)
        request.num_pages += num_new_pages

    def advance_window(self, request: RequestState) -> None:
        """Let go of window pages that the next token does not read.

        The step in flight may read them: it has ended when the one that is being planned begins.
        """
        assert request.reservation is not None, f"{request.request_id} is not running"
        request.reservation.window_advance(request.num_planned)

    def extend_window(self, request: RequestState, count: int) -> None:
        """Window pages for the next `count` tokens. Raises NoRoom and changes nothing."""
        assert request.reservation is not None, f"{request.request_id} is not running"
        end_page = pages_for_tokens(request.num_planned + count, self._page_size)
        changed = request.reservation.window_extend(end_page)
        if changed is not None:
            self.tables.update(request.row, changed.first_page, changed.refs, component=1)

    def commit(self, request: RequestState) -> None:
        """Full pages whose KV is computed and whose ids are known join the tree."""
        assert request.reservation is not None, f"{request.request_id} is not running"
        full_pages = request.num_computed // self._page_size
        if full_pages <= request.reservation.num_committed_pages:
            return
        changed = request.reservation.commit(request.token_slice(0, full_pages * self._page_size))
        if changed is not None:
            self.tables.update(request.row, changed.first_page, changed.refs)
        if self._tiers is not None and full_pages == request.prefill_end // self._page_size:
            self._tiers.used(request.reservation.node, ended=False)

    def expected_growth(self, horizon_tokens: int) -> int:
        """Pages that the running requests may ask for within their next `horizon_tokens`."""
        return sum(
            max(0, self._pages_at(request, horizon_tokens) - request.num_pages)
            for request in self._by_serial.values()
        )

    def own_growth(self, request: RequestState, horizon_tokens: int) -> int:
        """The same of a request that is about to start, past the pages of what it has."""
        held = pages_for_tokens(request.num_tokens, self._page_size)
        return self._pages_at(request, horizon_tokens) - held

    def most_common_key(self) -> str | None:
        """The routing key that most running requests have; of equals the greatest."""
        keys = Counter(
            request.request.routing_key
            for request in self._by_serial.values()
            if request.request.routing_key is not None
        )
        return max(keys, key=lambda key: (keys[key], key)) if keys else None

    def _pages_at(self, request: RequestState, horizon_tokens: int) -> int:
        reached = max(request.num_planned, request.num_tokens) + horizon_tokens
        return pages_for_tokens(min(reached, request.final_tokens), self._page_size)
