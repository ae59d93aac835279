"""The leader's end of the transfers where ranks share no memory with it.

The transfer engine stays as it is: it moves pages between the host arena and "the device", of which
what other ranks hold is reached over a link each. What a chunk has moved is in place on every rank
before the engine goes on.

    page = owner * pages_per_owner + slot      this rank is owner 0, or holds the first heads of it
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phloem.core.errors import GroupError
from phloem.core.transfer import LayerGate
from phloem.pools import HostArena
from phloem.transfer.copier import Copier
from phloem.transfer.page_link import Get, LoadNews, PageLink, Put

__all__ = ["APART_CHUNK_BYTES", "ApartCopier", "Holder", "LeaderGate", "tell_loads"]

_Slots = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]

# A link is slower than memory: what is urgent waits for one chunk, and layers come chunk by chunk.
APART_CHUNK_BYTES = 4 << 20
# What is sent at once, and how many of these may be unanswered: so much memory is in flight.
PIECE_BYTES = 1 << 20
# Small pages: who sends one answer reads no more questions, and these must have room on the way.
PIECE_PAGES = 512
MOST_UNANSWERED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A rank that is elsewhere: it holds head groups first_group ... end_group - 1 of the pages of
    an owner."""

    link: PageLink
    owner: int
    first_group: int
    end_group: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one rank holds of some pages; `slots` of its pool, `host` of the arena."""

    holder: Holder
    slots: _Slots
    host: _Slots


class ApartCopier:
    """Of one component. Belongs to the engine's copy thread, like the links; raises GroupError if a
    rank is gone. `own` copies what this rank holds of the pages of owner 0."""

    def __init__(
        self,
        own: Copier,
        arena: HostArena,
        *,
        component: int,
        pages_per_owner: int,
        holders: Sequence[Holder],
    ) -> None:
        self._own, self._arena, self._component = own, arena, component
        self._pages_per_owner, self._holders = pages_per_owner, tuple(holders)

    def to_host(self, device: _Slots, host: _Slots) -> None:
        """Whole pages."""
        own = device < self._pages_per_owner
        if own.any():
            self._own.to_host(device[own], host[own])
        pages = self._arena.bytes

        def ask(piece: _Piece) -> None:
            piece.holder.link.send(Get(self._component, piece.slots.tobytes()))

        def take(piece: _Piece) -> None:
            part = _part(pages, piece.holder)
            data = np.empty((len(piece.host), *part.shape[1:]), dtype=np.uint8)
            piece.holder.link.receive_bytes(data)
            part[piece.host] = data

        self._exchange(self._pieces(device, host, pages), ask, take)

    def to_device(self, device: _Slots, host: _Slots, first_layer: int, end_layer: int) -> None:
        """Layers first_layer ... end_layer - 1 of pages."""
        own = device < self._pages_per_owner
        if own.any():
            self._own.to_device(device[own], host[own], first_layer, end_layer)
        pages = self._arena.bytes[:, :, first_layer:end_layer]

        def give(piece: _Piece) -> None:
            put = Put(self._component, piece.slots.tobytes(), first_layer, end_layer)
            data = _part(pages, piece.holder)[piece.host]
            piece.holder.link.send(put, np.ascontiguousarray(data))

        def written(piece: _Piece) -> None:
            piece.holder.link.receive_ack()

        self._exchange(self._pieces(device, host, pages), give, written)

    def _pieces(self, device: _Slots, host: _Slots, pages: _Bytes) -> Iterator[_Piece]:
        """What other ranks hold of these pages; `pages`: what is to move of all in the arena."""
        owners, slots = np.divmod(device, self._pages_per_owner)
        for holder in self._holders:
            page_bytes = math.prod(_part(pages, holder).shape[1:])
            count = min(PIECE_PAGES, max(1, PIECE_BYTES // page_bytes))
            theirs = np.flatnonzero(owners == holder.owner)
            for low in range(0, len(theirs), count):
                part = theirs[low : low + count]
                yield _Piece(holder, slots[part], host[part])

    def _exchange(
        self,
        pieces: Iterable[_Piece],
        begin: Callable[[_Piece], None],
        finish: Callable[[_Piece], None],
    ) -> None:
        """Begin some pieces ahead of those that are finished; return when all are."""
        unanswered: deque[_Piece] = deque()
        try:
            for piece in pieces:
                begin(piece)
                unanswered.append(piece)
                if len(unanswered) == MOST_UNANSWERED:
                    finish(unanswered.popleft())
            while unanswered:
                finish(unanswered.popleft())
        except Exception:  # whatever it was: an answer that is owed is no answer to anything later
            while unanswered:
                with contextlib.suppress(GroupError):
                    finish(unanswered.popleft())
            raise


def _part(pages: _Bytes, holder: Holder) -> _Bytes:
    """Of (P, G, ...) the head groups that a rank holds; a view."""
    return pages[:, holder.first_group : holder.end_group]


class LeaderGate:
    """What the leader's own worker sees of the engine."""

    def __init__(self, engine: LayerGate) -> None:
        self._engine = engine

    def wait_layer(self, transfer_ids: tuple[int, ...], layer: int) -> None:
        """See `LayerGate`."""
        self._engine.wait_layer(transfer_ids, layer)

    def step_finished(self, step: int) -> None:
        """Other ranks may still be at it: the loop knows when all have finished."""


def tell_loads(links: Sequence[PageLink], news: LoadNews) -> None:
    """Let all ranks know where loads are. A rank that is gone is noticed elsewhere."""
    for link in links:
        with contextlib.suppress(GroupError):
            link.send(news)
