"""What was decided about each request's cached pages, and why: the newest are remembered.

prompt   | device | host, of these read from storage for it | new |
                  |--- load ---|--- computed all the same --------|
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Choice", "Decision", "Decisions", "StorageWay"]

REMEMBERED = 1024


class Choice(enum.Enum):
    """What became of the pages that lay on the host alone."""

    NONE = "none"  # there were none
    LOAD = "load"
    PART = "part"  # the first ones loaded, the rest computed
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageWay:
    """What storage was asked for while the request was queued. Seconds are of the found pages."""

    first_page: int
    asked_pages: int
    found_pages: int  # from the first one on, without a gap
    read_pages: int
    waited_s: float
    read_s: float  # expected
    compute_s: float  # expected
    reason: str

    def pages_within(self, start: int, end: int) -> int:
        """How many of the pages that were read are among those from `start` to `end`."""
        return max(0, min(self.first_page + self.read_pages, end) - max(self.first_page, start))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One admission of a request. Seconds are what was expected then.

    `storage_pages` are in `host_pages` too: they passed through the host.
    """

    request_id: str
    prompt_tokens: int  # after a retraction with what had been generated
    device_pages: int
    host_pages: int
    storage_pages: int
    new_pages: int  # neither on the device nor on the host
    load_pages: int
    choice: Choice
    reason: str
    chosen_s: float
    load_all_s: float
    compute_all_s: float
    measured: bool  # False: the expectation is the one to begin with
    storage: StorageWay | None = None


class Decisions:
    """A bounded memory, the newest last."""

    def __init__(self, capacity: int = REMEMBERED) -> None:
        self._kept: deque[Decision] = deque(maxlen=capacity)

    def note(self, decision: Decision) -> None:
        self._kept.append(decision)

    def newest(
        self,
        limit: int,
        request_id: str | None = None,
        *,
        name_of: Callable[[str], str] = str,
    ) -> list[Decision]:
        """The newest first, `limit` at most; of one request, if it is named.

        An id also names the requests that the server has numbered below it ("id 1", "id 2").
        `name_of` a request's id is what its caller knows it by.
        """
        out: list[Decision] = []
        for decision in reversed(self._kept):
            if len(out) >= limit:
                break
            if request_id is None or _is_of(name_of(decision.request_id), request_id):
                out.append(decision)
        return out


def _is_of(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted} ")
