"""The waiting requests, kept in policy order, and which of them a pass should try.

Order of a pass:

    1. returned    retracted requests, oldest first
    2. aged        one that has waited for AGED_PASSES or longer, if it is the turn of the aged:
                   every AGED_TURN-th admission is theirs, by turns the one that the policy likes
                   least (it would be overtaken for ever) and the oldest one
    3. the rest    in the order of the policy

1 and 2 are *barriers*: if one of them does not fit, nobody behind it is let in, so the pages that
running requests give back go to it. All others keep the policy's order however long the queue is
(no switch to another policy at some length), and a flood of aged requests takes its share only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from phloem.sched.policies import Policy, PolicyView, Rank
from phloem.sched.state import RequestState

__all__ = ["AGED_PASSES", "AGED_TURN", "MAX_TRIES", "STARTS_WITHIN_PASSES", "WaitQueue"]

AGED_PASSES = 32
AGED_TURN = 4
# K: among endless hot requests a cold one is aged after AGED_PASSES passes, and then it is the
# turn of the least liked after at most 2 x AGED_TURN admissions; it starts as soon as it fits.
# So it starts within K passes if 8 others are let in, and it fits, within the last 32 of them.
STARTS_WITHIN_PASSES = 64
MAX_TRIES = 64  # requests looked at in one pass


class WaitQueue:
    """Requests by id, in arrival order and in policy order. Adding and removing cost O(log n)."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._epoch: object = object()
        self._arrivals = 0
        self._by_id: dict[str, _Entry] = {}  # in order of arrival
        self._order: list[_Entry] = []  # in order of the policy
        self._returned: dict[str, RequestState] = {}
        self._refresh_round: Iterator[RequestState] = iter(())
        self._admitted_since_turn = AGED_TURN
        self._turn_of_oldest = False

    def __len__(self) -> int:
        return len(self._by_id) + len(self._returned)

    def __iter__(self) -> Iterator[RequestState]:
        yield from self._returned.values()
        for entry in self._by_id.values():
            yield entry[2]

    def add(self, request: RequestState, view: PolicyView) -> None:
        """Queue a new request; its match must be set if the policy looks at the cache."""
        self._arrivals += 1
        entry = (self._policy.rank(request, view), self._arrivals, request)
        insort(self._order, entry, key=_place)
        self._by_id[request.request_id] = entry

    def put_back(self, request: RequestState) -> None:
        """Queue a retracted request: it goes before all others."""
        self._returned[request.request_id] = request

    def remove(self, request: RequestState) -> None:
        """Take a request out (aborted)."""
        if self._returned.pop(request.request_id, None) is None:
            entry = self._by_id.pop(request.request_id)
            del self._order[bisect_left(self._order, _place(entry), key=_place)]

    def admit(self, request: RequestState, *, barrier: bool) -> None:
        """Take a request out because it starts; `barrier` as `candidates` gave it."""
        if barrier and request.request_id in self._by_id:
            self._admitted_since_turn = 0
            self._turn_of_oldest = not self._turn_of_oldest
        else:
            self._admitted_since_turn += 1
        self.remove(request)

    def rerank(self, request: RequestState, view: PolicyView) -> None:
        """The request's cached prefix has changed."""
        entry = self._by_id.get(request.request_id)
        if entry is None:
            return
        rank = self._policy.rank(request, view)
        if rank != entry[0]:
            del self._order[bisect_left(self._order, _place(entry), key=_place)]
            entry = (rank, entry[1], request)
            insort(self._order, entry, key=_place)
            self._by_id[request.request_id] = entry

    def next_to_refresh(self) -> RequestState | None:
        """Queued requests in turn, one a call; None after the last of a round."""
        for request in self._refresh_round:
            entry = self._by_id.get(request.request_id)
            if entry is not None and entry[2] is request:  # else it has left since the round began
                return request
        self._refresh_round = iter([entry[2] for entry in self._by_id.values()])
        return None

    def candidates(self, view: PolicyView) -> list[tuple[RequestState, bool]]:
        """At most MAX_TRIES requests to try in this order, each with: is it a barrier?"""
        self._follow_epoch(view)
        out = [(request, True) for request in islice(self._returned.values(), MAX_TRIES)]
        aged = self._aged(view)
        if aged is not None:
            out.append((aged, True))
        ahead = islice(self._order, max(0, MAX_TRIES - len(out)))
        out += [(entry[2], False) for entry in ahead if entry[2] is not aged]
        return out

    def _aged(self, view: PolicyView) -> RequestState | None:
        """Whose turn it is of those that have waited long; None if nobody's."""
        if not self._by_id or self._admitted_since_turn < AGED_TURN:
            return None
        deadline = view.pass_no - AGED_PASSES
        oldest = next(iter(self._by_id.values()))[2]
        if oldest.queued_at_pass > deadline:
            return None
        if self._turn_of_oldest:
            return oldest
        worst = next(e for e in reversed(self._order) if e[2].queued_at_pass <= deadline)
        # Of equal ranks the first to arrive: it is aged, since a later one is.
        return self._order[bisect_left(self._order, worst[0], key=_rank)][2]

    def _follow_epoch(self, view: PolicyView) -> None:
        epoch = self._policy.epoch(view)
        if epoch == self._epoch:
            return
        self._epoch = epoch
        rank = self._policy.rank
        for request_id, (_, arrival, request) in self._by_id.items():
            self._by_id[request_id] = (rank(request, view), arrival, request)
        self._order = sorted(self._by_id.values(), key=_place)


_Entry = tuple[Rank, int, RequestState]


def _place(entry: _Entry) -> tuple[Rank, int]:
    return entry[0], entry[1]


def _rank(entry: _Entry) -> Rank:
    return entry[0]
